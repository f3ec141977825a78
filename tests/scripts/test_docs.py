"""The pages of the documentation and the tables of results: links, commands, length."""

import csv
import pathlib
import re
import textwrap

import pytest

from anp_jax.config import errors, key_table, resolve, strategy
from anp_jax.reporting import telemetry
from tests import typed_commands

_ROOT = pathlib.Path(__file__).parents[2]
_PAGES = [_ROOT / 'README.md', _ROOT / 'CONTRIBUTING.md', *sorted((_ROOT / 'docs').glob('*.md'))]
_LINK = re.compile(r'\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)')


def _anchors(path):
  """Anchors of a page's headings: words in lower case, joined by hyphens."""
  titles = re.findall(r'^#+ (.+)$', path.read_text(), re.M)
  return {re.sub(r'[^\w\- ]', '', title.lower()).strip().replace(' ', '-') for title in titles}


@pytest.mark.parametrize('page', _PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
  for name, anchor in _LINK.findall(page.read_text()):
    target = page.parent / name if name else page
    assert target.exists(), name
    assert not anchor or anchor in _anchors(target), f'{name}#{anchor}'


@pytest.mark.parametrize('page', _PAGES, ids=lambda page: page.name)
def test_every_key_on_a_command_line_exists(page):
  keys = set(key_table.KEYS)
  for name in strategy.BUILT_IN:
    keys |= set(resolve.strategy_keys(name))
  typed = set(re.findall(r'--config\.([a-z_0-9.]+)=', page.read_text()))
  assert typed <= keys


def _commands(text):
  """The lines of a page's blocks, and what stands in backticks."""
  for block in re.findall(r'(?:^    .*\n)+', text, re.M):
    lines = re.sub(r'\\\n\s*', ' ', block).splitlines()
    yield from (re.sub(r'(^|\s)#.*', '', line) for line in lines)
  for paragraph in re.sub(r'^    .*$', '', text, flags=re.M).split('\n\n'):
    yield from (' '.join(code.split()) for code in re.findall(r'`([^`]+)`', paragraph))


def _check_files(text):
  assert not re.search(r'(?<!\w)/(?:tmp|root)/', text), 'a folder of the machine that wrote it'
  targets = re.findall(r'^([a-z-]+):', (_ROOT / 'Makefile').read_text(), re.M)
  assert set(re.findall(r'(?:^|`|    )make ([a-z-]+)', text, re.M)) <= set(targets)
  names = re.findall(
    r'\b(?:scripts|configs|tests|results)/[\w./]+[a-z0-9]\.(?:py|sh|sbatch|csv)\b', text
  )
  assert [name for name in names if not (_ROOT / name).exists()] == []


@pytest.mark.parametrize('page', _PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_exists(page):
  text = page.read_text()
  _check_files(text)
  for command in _commands(text):
    for module, arguments in typed_commands.split(command):
      typed_commands.check(module, arguments)


@pytest.mark.parametrize('path', sorted((_ROOT / 'results').glob('*.csv')), ids=lambda p: p.stem)
def test_every_command_of_a_result_exists(path):
  with path.open(newline='') as file:
    commands = {row['command'] for row in csv.DictReader(file)}
  for text in commands:
    _check_files(text)
    parts = list(typed_commands.split(text))
    assert parts or text.startswith('make '), f'no command: {text!r}'
    for module, arguments in parts:
      typed_commands.check(module, arguments)


@pytest.mark.parametrize(
  'command, words',
  [
    ('python -m scripts.bench.startup', 'not in the repository'),
    ('python scripts/bench/startup.py', 'not in the repository'),
    ('python -m scripts.bench.step --rate=3', '2'),
    ('python main.py --config=configs/lenet.py --config.optimizer.eta=1', 'optimizer.eta'),
    ('python main.py --config=configs/lenet.py --mod=train', 'status 2'),
    ('python -m anp_jax.tools.study model_ring', 'status 2'),
  ],
)
def test_what_does_not_exist_is_seen(command, words):
  with pytest.raises((AssertionError, errors.ConfigError, SystemExit), match=words):
    for module, arguments in typed_commands.split(command):
      typed_commands.check(module, arguments)


@pytest.mark.slow
def test_the_example_of_a_search(tmp_path, monkeypatch):
  pytest.importorskip('optuna')
  page = (_ROOT / 'docs/tune.md').read_text()
  code = textwrap.dedent(re.search(r' +import optuna\n.*n_trials=5\)', page, re.S)[0])
  monkeypatch.chdir(tmp_path)
  exec(code.replace('n_trials=5', 'n_trials=2').replace('6 epochs', '2 steps'), {})
  assert [telemetry.of_kind(f'runs/search/{i}', 'result')[0]['step'] for i in (0, 1)] == [2, 2]


def test_the_pages_are_short_enough_to_read():
  lengths = {page.name: len(page.read_text().splitlines()) for page in _PAGES}
  assert lengths.pop('CONTRIBUTING.md') <= 60
  assert lengths['README.md'] <= 200
  assert sum(lengths.values()) <= 3000
