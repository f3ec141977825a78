"""Whatever is typed or is in a run's files: status 2 and one line, or success.

`make test` tries a few dozen inputs a target, always the same; ANP_FUZZ, as in
`make soak`, sets how many, and they are new each time.
"""

import contextlib
import io
import json
import math
import os
import random

from hypothesis import strategies as st
import pytest

from anp_jax import __main__ as main, config as config_lib
from anp_jax.checkpoint import run_dir
from anp_jax.checkpoint.weights import processors, published_weights
from anp_jax.config import command_line, exits
from anp_jax.tools.compare import __main__ as compare, comparison_curves
from tests import builders, mutations

_TINY = 'configs/resnet_anp.py:tiny'


def _check(command):
  """The oracle; returns the status and the line."""
  err = io.StringIO()
  with contextlib.redirect_stderr(err), contextlib.redirect_stdout(None):
    status = command()
  text = err.getvalue()
  assert status in (0, 2), status
  if status == 2:
    assert text.startswith('error: ') and text.endswith('\n'), text
    assert len(text.splitlines()) == 1, text
  else:
    assert text == ''
  return status, text


class _Accepted(BaseException):
  """The config is valid, and a run would begin."""


def _typed(*arguments):
  """What main.py says of a command line, before a run would begin."""

  def accept(_):
    raise _Accepted

  def command():
    try:
      return main.main(['main.py', *arguments])
    except _Accepted:
      return 0

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(main.xla_flags, 'enable_for', accept)
    return _check(command)


# What is typed.

_KEYS = sorted(config_lib.known_keys())
_NASTY = (
  *('', ' ', '\0', 'a\nb', '\r', '\x1b[2J', '\u2028', '\ud800', '{[]: 1}', '{1, 2}', '(' * 90),
  *': :: a: :b os: os:getcwd a..b:C . .. nan -inf 1e400 1e30 None True () [] {} = =='.split(),
  *'~ ~nobody/x $HOME / /dev/null list:/dev/null tar: hf: tfds:../../x model.name=x;y'.split(),
  *('s3://', 'gs://a', 'http://x', 'a' * 5000, '9' * 400, '-' + '9' * 400, '9' * 5000),
  *('0x' + 'f' * 5000, '(' * 5000, '[' * 100_000, '(' * 80 + ')' * 80, '-' * 9000 + '1'),
  *("(('(' , 0),)", "(('a{99999999999}', 0),)", "(('" + '(' * 999 + "', 0),)"),
  *(f"(('a', {'9' * 400}),)", "(('a', 1e400),)", f'({"9" * 400}, 1)', '9' * 400 + ' steps'),
  *('1e308 epochs', '5e-324 epochs', '0.1 steps', '1 steps, ' * 500),
  *('1,8@' + '9' * 18 + ' steps', '1:' + '9' * 18),
)
_PIECES = st.sampled_from(
  [*'(),\'":.- 1\\*[{~=;@', '9' * 30, *'e9 steps epochs lenet sync None'.split()]
)
_VALUES = st.one_of(
  st.sampled_from(_NASTY),
  st.text(max_size=20),
  st.lists(_PIECES, max_size=12).map(''.join),
  st.integers().map(str),
  st.floats().map(str),
)


@builders.fuzzed(50, st.lists(st.tuples(st.sampled_from(_KEYS), _VALUES), min_size=1, max_size=2))
def test_any_value_of_any_key(typed):
  _typed(f'--config={_TINY}', *(f'--config.{k}={v}' for k, v in typed))


@pytest.mark.parametrize('value', _NASTY, ids=range(len(_NASTY)))
def test_each_nasty_value_of_every_key(value):
  recipe = command_line.load(_TINY, {})
  for key, declared in config_lib.known_keys().items():
    with contextlib.suppress(config_lib.ConfigError):
      declared.validate(key, declared.parse(key, value))  # most go no further
      config_lib.resolved(recipe, {key: value})


_FLAGS = st.sampled_from(
  '--config --workdir --mode --checkpoint --output --change --coordinator --num_processes '
  '--process_id --config. -- - --config.seed --trust --nonsense -x --config.data'.split()
)


@builders.fuzzed(100, st.lists(st.tuples(_FLAGS, st.booleans(), _VALUES), min_size=1, max_size=4))
def test_any_flags(typed):
  arguments = []
  for flag, is_joined, value in typed:
    arguments += [f'{flag}={value}'] if is_joined else [flag, value]
  _typed(*arguments)


# What lies in a run's files.

_TOKENS = (
  *(b'[' * 100_000, b'{"a":' * 50_000, b'9' * 400, b'9' * 5000, b'\\ud800', b'\xff', b'\0'),
  *b'1e999 NaN null true -1 "" [] {} 2.5 "step" "kind" "epoch" "loss" "result"'.split(),
  *b'"change" "time" "0" "id2label" "a:b"'.split(),
)


def _lines(count):
  for step in range(1, count):
    scores = {'step': step, 'time': 1.0, 'epoch': step / 2, 'loss': 1.5, 'anp_top1': 0.5}
    speed = {'images_per_second': 9.0, 'seconds': 2.0, 'input_wait': 0.1, 'learning_rate': 0.1}
    yield {'kind': 'train', **scores, **speed}
    yield {'kind': 'validation', **scores}
  yield {'kind': 'time', 'step': 1, 'what': 'start', 'seconds': 1.0}
  yield {'kind': 'change', 'step': 1, 'key': 'seed', 'old': 1, 'new': 2}
  yield {'kind': 'result', 'step': count, 'epoch': 1.0, 'best': {'loss': 1.5}}


_METRICS = '\n'.join(map(json.dumps, _lines(4))).encode()


@pytest.fixture(scope='module')
def whole_run(tmp_path_factory):
  """A workdir with the small files of a run, and their bytes by name."""
  workdir = tmp_path_factory.mktemp('run')
  names = ['old_car', 'red_dog']
  files = {
    # One line, as each of the others.
    'config.json': json.dumps(config_lib.flat(command_line.load(_TINY, {}))).encode(),
    'metrics.jsonl': _METRICS,
    'labels.json': json.dumps(
      {'classes': names, 'adjectives': ['old', 'red'], 'nouns': ['car', 'dog']}
    ).encode(),
  }
  builders.write_tree(workdir, files)
  return workdir, files


def _compare(workdir, draws=True):
  command = ['c', str(workdir), f'--output={workdir}/c.html']
  with pytest.MonkeyPatch.context() as patch:
    if not draws:  # a second each
      patch.setattr(comparison_curves, 'draw', lambda _: b'')
    return _check(lambda: compare.main(command))


def _check_file(whole_run, name, data, draws):
  """Reads a run with other bytes in one of its files, which is put back."""
  workdir, files = whole_run
  mutations.replace_file(workdir / name, data)
  try:
    _compare(workdir, draws=draws)
    if name == 'config.json':
      _typed(f'--workdir={workdir}', '--mode=evaluate')
    if name == 'labels.json':
      _check(lambda: exits.with_status()(_vocabulary)([str(workdir)]))
  except BaseException as e:
    e.add_note(f'{name}: {data[:3000]!r}')
    raise
  finally:
    mutations.replace_file(workdir / name, files[name])


_VALUES_OF_JSON = (
  *(None, True, -1, 0, 0.5, 10**400, 2**60, math.inf, math.nan, '', 'x', 'a:b', '['),
  *([], [[]], [1, 2], ['a', 'b'], {}, {'a': 1}, '0 steps', '9e99 epochs'),
)


def _replaced(data, draw):
  """A copy of lines of JSON in which one value of one line is another."""
  lines = data.split(b'\n')
  index = draw.randrange(len(lines))
  value = json.loads(lines[index])
  key = draw.choice(sorted(value))
  choice = draw.choice((*_VALUES_OF_JSON, 'left out'))
  value[key] = choice
  if choice == 'left out':
    del value[key]
  lines[index] = json.dumps(value).encode()
  return b'\n'.join(lines)


def _mutated(data, draw):
  return mutations.mutated(data, draw, _TOKENS)


@pytest.mark.parametrize('name', ['config.json', 'metrics.jsonl', 'labels.json'])
@pytest.mark.parametrize('damage', [_mutated, _replaced])
def test_damaged_files_of_a_run(name, damage, whole_run):
  workdir, files = whole_run
  assert _compare(workdir, draws=False)[0] == 0
  draw = random.Random(name if not builders.FUZZED else None)
  for i in range(builders.FUZZED or 6):
    draws = name == 'metrics.jsonl' and not i  # what is drawn
    _check_file(whole_run, name, damage(files[name], draw), draws)


def _vocabulary(arguments):
  run_dir.labels(arguments[0])


_SAVED = {
  'architectures': ['ResNetForImageClassification'],
  'num_labels': 2,
  'id2label': {'0': 'old car', '1': 'red dog'},
  'label_names': ['a', 'b'],
  'label_descriptions': {'a': 'c'},
  'hidden_act': 'relu',
}
_PROCESSOR = {
  'crop_pct': 0.875,
  'do_resize': True,
  'size': {'shortest_edge': 224},
  'image_mean': [0.5, 0.5, 0.5],
  'image_std': [0.5, 0.5, 0.5],
  'resample': 3,
  'image_processor_type': 'ConvNextImageProcessor',
}


@pytest.mark.parametrize('name', ['config.json', 'preprocessor_config.json'])
def test_damaged_files_of_published_weights(name, tmp_path):
  files = {'config.json': _SAVED, 'preprocessor_config.json': _PROCESSOR}
  for file, value in files.items():
    (tmp_path / file).write_text(json.dumps(value))
  draw = random.Random(name if not builders.FUZZED else None)
  for _ in range(builders.FUZZED or 100):
    data = mutations.mutated(json.dumps(files[name]).encode(), draw, _TOKENS)
    mutations.replace_file(tmp_path / name, data)
    try:
      _check(lambda: exits.with_status()(_published)([str(tmp_path)]))
    except BaseException as e:
      e.add_note(f'{name}: {data[:3000]!r}')
      raise


def _published(arguments):
  """What `published.read` does of a folder's JSON."""
  folder = arguments[0]
  saved = published_weights.architecture(os.path.join(folder, published_weights.FILE))
  published_weights._names(saved, 2)
  read = processors.read(folder, saved, 'resnet18')
  processors.normalisation(*read)
  processors.images(*read, 'bilinear')


@builders.fuzzed(
  30,
  st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  ),
)
def test_any_json_as_names_of_classes(value):
  published_weights._names({'id2label': value}, 2)
  published_weights._names({'label_names': value, 'label_descriptions': value}, 1)
  for wrapped in (value, {'id2label': value}, {'classes': value}):
    text = json.dumps(wrapped)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr('builtins.open', _opened(text))
      _check(lambda: exits.with_status()(_labels)(['labels.json']))


def _opened(text):
  return lambda *_, **__: io.StringIO(text)


def _labels(arguments):
  published_weights.read_labels(arguments[0])


def test_a_list_as_id2label_names_the_classes():
  assert published_weights._names({'id2label': ['a', 'b']}, 2) == ('a', 'b')
  assert published_weights._names({'id2label': 5}, 2) == ()


def test_a_batch_beyond_all_counts_is_not_a_finished_run():
  for text in ('1' + '0' * 30, '1e30'):
    status, line = _typed(f'--config={_TINY}', f'--config.batch_size={text}')
    assert status == 2 and 'config.batch_size=1' in line
  for count, expected in ((2**24, 0), (2**24 + 1, 2)):
    typed = f'--config.batch_size={count}'
    assert _typed(f'--config={_TINY}', typed)[0] == expected
  assert config_lib.steps('1 epochs', 10**12, 64) == 1
  assert config_lib.steps('0 epochs', 10**12, 64) == 0
