"""The pages of the documentation: their links, keys, flags and length."""

import pathlib
import re

import pytest

from anp_jax.config import key_table, resolve, strategy

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


def test_the_pages_are_short_enough_to_read():
  lengths = {page.name: len(page.read_text().splitlines()) for page in _PAGES}
  assert lengths.pop('CONTRIBUTING.md') <= 60
  assert lengths['README.md'] <= 200
  assert sum(lengths.values()) <= 3000
