"""Configs: every mistake answered in one line, golden texts."""

import json
import os
import pathlib

import pytest

from anp_jax import config as config_lib
from anp_jax.config import command_line, optimizers
from tests import builders, launching

GOLDEN = launching.ROOT / 'tests' / 'golden'
_TINY = f'{launching.ROOT}/configs/resnet_anp.py:tiny'

PLAIN = """
from anp_jax import config as config_lib

VARIANTS = {'small': {'batch_size': 8}, 'large': {'batch_size': 512}}

def get_config(variant=''):
  c = config_lib.base()
  c.update(config_lib.variant(variant, VARIANTS))
  return c
"""


@pytest.fixture
def recipe(tmp_path):
  """Writes a config file of the given body; returns its path."""

  def write(body=PLAIN, name='recipe.py'):
    path = tmp_path / name
    path.write_text(body)
    return str(path)

  return write


def _changed(line):
  """A config file that runs one line on the base."""
  return (
    'from anp_jax import config as config_lib\n'
    'def get_config(variant=""):\n'
    '  c = config_lib.base()\n'
    f'  {line}\n'
    '  return c\n'
  )


# The lists that a recipe for somebody's own photographs looks for.
_LISTS = {
  'anp553': ('mtvso553_anplabels.txt', 'mtvso553_adjlabels.txt', 'mtvso553_nounlabels.txt'),
  'anp1200': ('mvso1200_anp_list.txt', 'mvso1200_adj_list.txt', 'mvso1200_noun_list.txt'),
}


def _own_files(variant):
  """Makes what a recipe expects in the current folder; overrides for it."""
  for name in _LISTS.get(variant, ()):
    pathlib.Path(name).touch()
  return {'data.path': '.'} if variant in _LISTS else {}


def _golden_cases():
  """(file, variant) of every recipe that is shipped."""
  cases = []
  for path in sorted((launching.ROOT / 'configs').glob('*.py')):
    if path.stem == '__init__':
      continue
    space = {}
    exec(compile(path.read_text(), str(path), 'exec'), space)
    variants = [v for v in space.get('VARIANTS', {}) if v]
    cases += [(path, variant) for variant in ['', *variants]]
  return cases


def _texts(config):
  """The value of each key of a config, as a golden file has it."""
  return {key: repr(value) for key, value in config_lib.flat(config).items()}


def _check_golden(name, texts):
  """Compares values with the golden file of a name, or writes the file."""
  text = ''.join(f'{key} = {texts[key]}\n' for key in sorted(texts))
  golden = GOLDEN / f'{name}.txt'
  if os.environ.get('ANP_UPDATE_GOLDEN') == '1':
    golden.parent.mkdir(exist_ok=True)
    golden.write_text(text)
  assert golden.is_file(), f'no {golden.name}: run with ANP_UPDATE_GOLDEN=1'
  assert text == golden.read_text()


def test_golden_base():
  """A change of a default shows in review as a change of one line of base.txt."""
  _check_golden('base', _texts(config_lib.base()))


@pytest.mark.parametrize(
  'path,variant',
  [
    pytest.param(path, variant, id=f'{path.stem}-{variant or "default"}')
    for path, variant in _golden_cases()
  ],
)
def test_golden(path, variant, tmp_path, monkeypatch):
  """The file of a recipe has the keys whose value is not the base's, or that one of them lacks."""
  spec = f'{path}:{variant}' if variant else str(path)
  monkeypatch.chdir(tmp_path)
  base = _texts(config_lib.base())
  texts = dict.fromkeys(base, 'absent') | _texts(command_line.load(spec, _own_files(variant)))
  changed = {key: text for key, text in texts.items() if text != base.get(key)}
  _check_golden(f'{path.stem}_{variant or "default"}', changed)


@pytest.mark.parametrize('variant', _LISTS)
def test_recipes_of_published_lists(variant, tmp_path, monkeypatch):
  """Each thing that is missing is asked for in one line that names its key."""
  monkeypatch.chdir(tmp_path)
  spec = f'{launching.ROOT}/configs/resnet_anp.py'
  text = builders.refusal(command_line.load, f'{spec}:{variant}', {})
  assert text == "config.data.path='': expected the path of the folder"
  photographs = {'data.path': '.'}
  for name in _LISTS[variant]:
    text = builders.refusal(command_line.load, f'{spec}:{variant}', photographs)
    assert text == (
      f'config.data.lists={",".join(_LISTS[variant])!r}: expected files of '
      f'names, one a line, but there is no {name!r}'
    )
    pathlib.Path(name).touch()
  config = config_lib.flat(command_line.load(f'{spec}:{variant}', photographs))
  paper = config_lib.flat(command_line.load(f'{spec}:paper', {}))
  differs = {key for key in config if config[key] != paper.get(key)}
  assert differs == {'data.source', 'data.path', 'data.lists'}


def test_no_golden_without_a_recipe():
  names = {f'{path.stem}_{variant or "default"}.txt' for path, variant in _golden_cases()}
  assert {p.name for p in GOLDEN.glob('*')} <= names | {'base.txt'}


def test_base_is_valid():
  config = config_lib.resolved(config_lib.base())
  assert config_lib.flat(config) == config_lib.flat(config_lib.base())


def test_a_resolved_config_cannot_be_written_to():
  config = command_line.load(f'{launching.ROOT}/configs/resnet_anp.py', {})
  saved = json.loads(config_lib.to_json(config))
  for frozen in (config, config_lib.replaced(config, {'seed': 1}), config_lib.from_flat(saved)):
    with pytest.raises(AttributeError, match='immutable'):
      frozen.seed = 2
    with pytest.raises(AttributeError, match='immutable'):
      frozen.data.resize = 2


def test_load_and_override(recipe):
  config = command_line.load(
    recipe() + ':small',
    {
      'seed': '3',
      'optimizer.learning_rate': '1',
      'optimizer.name': 'adam',
      'data.crop_area': '[0.5, 1]',
      'log.tensorboard': 'false',
      'sharding': "(('kernel', 'fsdp'), ('.*', 'replicate'))",
    },
  )
  assert config.batch_size == 8
  assert config.seed == 3
  assert type(config.optimizer.learning_rate) is float
  assert config.optimizer.learning_rate == 1.0
  assert config.optimizer.name == 'adam'
  assert config.data.crop_area == (0.5, 1)
  assert config.log.tensorboard is False
  assert config.sharding == (('kernel', 'fsdp'), ('.*', 'replicate'))


@pytest.mark.parametrize(
  'key,text,expected',
  (
    ('optimizer.learning_rat', '1', "rat; did you mean 'optimizer.learning_rate'?"),
    ('learning_rate', '1', "learning_rate; did you mean 'optimizer.learning_rate'?"),
    ('bach_size', '1', "config.bach_size; did you mean 'batch_size'?"),
    ('zzzzzzzz', '1', 'unknown key config.zzzzzzzz'),
    ('log', 'x', 'config.log is a group; its keys are log.every, log.tensorboard'),
    ('optimizer', 'adam', 'config.optimizer is a group; its keys are opti'),
    ('batch_size', '6.5', 'config.batch_size=6.5: expected a whole number'),
    ('batch_size', 'many', "config.batch_size='many': expected a whole number"),
    ('batch_size', 'True', 'config.batch_size=True: expected a whole number'),
    ('ema', 'high', "config.ema='high': expected a number"),
    ('schedule.end', '1e999', 'schedule.end=inf: expected a number'),
    ('log.tensorboard', '1', 'log.tensorboard=1: expected True or False'),
    ('data.held_out', 'a_b', "config.data.held_out='a_b': expected a tuple like ('a', 'b')"),
    ('data.mean', '3', 'config.data.mean=3: expected a tuple like (123.68'),
    ('optimizer.name', 'adamm', f'expected one of {", ".join(optimizers.OPTIMIZERS)} or pack'),
    ('optimizer.name', 'adamm', "package.module:function; did you mean 'adam'?"),
    ('schedule.name', 'cosin', "did you mean 'cosine'?"),
    ('model.name', 'resnet50v', "did you mean 'resnet50'?"),
    ('model.dtype', 'bfloat', "did you mean 'bfloat16'?"),
    ('data.source', 'anp_shape', "did you mean 'anp_shapes'?"),
    *(
      ('data.source', name, f'config.data.source={name!r}: expected one of')
      for name in ('tfds:', 'tsfd:mnist', 'Circles:')
    ),
    ('data.source', 'folder', "data.path='': expected the path of the folder"),
    ('data.augment', 'crops', "did you mean 'crop'?"),
    ('data.crop_area', '(0.5,)', 'expected 2 numbers above 0'),
    ('data.crop_area', '(0.9, 0.5)', 'at most 1, low before high'),
    ('data.crop_area', '(0.5, 1.5)', 'expected 2 numbers above 0, at most 1'),
    ('data.std', '(1, 0, 1)', 'expected 3 numbers above 0'),
    ('data.resize', '32', 'data.resize=32: expected at least data.image_size'),
    ('data.flip', '1.5', 'config.data.flip=1.5: expected a number from 0 to 1'),
    ('accumulate', '0', 'config.accumulate=0: expected a number above 0'),
    ('seed', '-1', 'config.seed=-1: expected a number from 0, below 2147483648'),
    ('seed', '2147483648', 'seed=2147483648: expected a number from 0, below'),
    ('mesh.data', '0', 'config.mesh.data=0: expected a count of devices, or'),
    ('optimizer.momentum', '1.0', 'momentum=1.0: expected a number from 0, bel'),
    ('optimizer.momentum', '1', 'momentum=1.0: expected a number from 0, bel'),
    ('schedule.end', '2', 'schedule.end=2.0: expected a number from 0 to 1'),
    ('duration', '10 epoks', "config.duration='10 epoks' is not a duration"),
    ('duration', '0 steps', "duration='0 steps': expected more than nothing"),
    ('schedule.every', '4 steps, 2 steps', 'each duration longer than the one before'),
    ('schedule.every', '0 steps', 'expected more than nothing'),
    ('schedule.every', '4 steps; 8', "schedule.every='4 steps; 8' is not a duration"),
    ('sharding', "(('[', 'fsdp'),)", "'[' is not a regular expression"),
    ('sharding', "(('.*', 'fdsp'),)", "did you mean 'fsdp'?"),
    ('sharding', "('.*', 'fsdp')", "expected pairs such as (('.*', 'fsdp'),)"),
  ),
)
def test_bad_override(recipe, key, text, expected):
  name = {'schedule.name': 'step'} if key == 'schedule.every' else {}
  assert expected in builders.refusal(command_line.load, recipe(), name | {key: text})


@pytest.mark.parametrize(
  'line,expected',
  (
    ('c.optimizer.learning_rat = 1.0', "rat; did you mean 'optimizer.learning_rate'?"),
    ('c.optimiser = config_lib.base().optimizer', "mean 'optimizer."),
    ("c.optimizer = 'adam'", 'recipe.py: TypeError: Could not override fiel'),
    ('del c.ema', 'config.ema is missing (default: 0.0)'),
    ("c.ema = float('nan')", 'config.ema=nan: expected a number'),
    ("c.batch_size = '64'", "Could not override field 'batch_size'"),
    ('c.batch_size = 6.5', "Could not override field 'batch_size'"),
    ('c.batch_size = c.batch_size_per_device = 0', 'config.batch_size=0: expe'),
    ("c.schedule.name = 'cosin'", "did you mean 'cosine'?"),
    ("c.duration = 'ten epochs'", "config.duration='ten epochs' is not a dura"),
    ('c = {}', 'get_config must return a ConfigDict'),
    ('1 / 0', 'ZeroDivisionError: division by zero'),
    ('def get_config(:', 'recipe.py: SyntaxError'),
    ('import nothing_of_this_name', 'ModuleNotFoundError: No module named'),
  ),
)
def test_bad_file(recipe, line, expected):
  assert expected in builders.refusal(command_line.load, recipe(_changed(line)), {})


@pytest.mark.parametrize('value', ['64', 64.0, True, None])
def test_type_is_checked_where_the_config_does_not(value):
  config = config_lib.base()
  with config.ignore_type():
    config.batch_size = value
  line = f'config.batch_size={value!r}: expected a whole number'
  assert line in builders.refusal(config_lib.resolved, config)


def test_unknown_variant_names_the_nearest(recipe):
  text = builders.refusal(command_line.load, recipe() + ':smal', {})
  assert text == "no variant 'smal' (have: small, large); did you mean 'small'?"


def test_paths_must_exist(recipe, tmp_path):
  overrides = {'data.source': 'arrays', 'data.path': str(tmp_path / 'none')}
  assert 'expected a path that exists' in builders.refusal(command_line.load, recipe(), overrides)
  command_line.load(recipe(), {**overrides, 'data.path': str(tmp_path)})


def test_data_dir(monkeypatch):
  config = config_lib.base()
  monkeypatch.delenv('ANP_DATA', raising=False)
  monkeypatch.setenv('XDG_CACHE_HOME', '/cache')
  assert config_lib.data_dir(config) == '/cache/anp_jax/data'
  monkeypatch.setenv('ANP_DATA', '/sets')
  assert config_lib.data_dir(config) == '/sets'
  config.data.dir = '/mine'
  assert config_lib.data_dir(config) == '/mine'


_SERVERS = 'parameter_server'
_RING = {'strategy.models': "('seed=1',)"}
_WORKERS = {'strategy.simulate.workers': '4'}
_DANA = {'strategy.look_ahead': 'dana'}
_ROWS = 'expected equal, measured, or whole numbers'
_NORM = 'norm_group=0.*where strategy.rows is not'


@pytest.mark.parametrize(
  'name, overrides, message',
  [
    (_SERVERS, {'optimizer.name': 'lamb'}, 'sgd, momentum, nesterov, rmsprop, adam, adamw, lion'),
    (_SERVERS, {'optimizer.name': 'lars'}, 'a slice of the weights, element by element'),
    (_SERVERS, {'strategy.mode': 'asynch'}, "did you mean 'async'"),
    (_SERVERS, {'strategy.backup_workers': '1'}, 'nobody is waited for'),
    (_SERVERS, {'strategy.parts': '2'}, "parts=2: expected 0 where strategy.mode is 'async'"),
    (_SERVERS, {'sharding': "(('.*', 'fsdp'),)"}, 'the servers divide the state'),
    (_SERVERS, {'strategy.servers': '0'}, 'strategy.servers=0'),
    (_SERVERS, _WORKERS | {'strategy.servers': '2'}, 'strategy.servers=2: expected 1 where'),
    (_SERVERS, {'strategy.dedicated': 'True', 'batch_size': '0'}, 'expected a number of images'),
    (
      _SERVERS,
      _WORKERS | {'strategy.mode': 'synchronous', 'optimizer.clip_norm': '1'},
      'clip_norm=1.0: expected 0 where .* real workers clip the gradients',
    ),
    (
      _SERVERS,
      _WORKERS | {'strategy.mode': 'rennala', 'model.norm_group': '0'},
      'norm_group=0: expected 1 or more where .* real workers normalise the parts',
    ),
    (_SERVERS, {'strategy.look_ahead': 'dan'}, "'dan': .*none, dana.*did you mean 'dana'"),
    (_SERVERS, _DANA | {'strategy.mode': 'rennala'}, "'none' where strategy.mode is 'rennala'"),
    (_SERVERS, _DANA | {'strategy.mode': 'synchronous'}, "'none' where .* is 'synchronous'"),
    (_SERVERS, _DANA | {'optimizer.name': 'adam'}, "'none' where optimizer.name is 'adam'"),
    ('channel_split', {'strategy.offload_to': "('cpu',)"}, 'offload_to=.*: expected each once'),
    ('channel_split', {'strategy.offload_to': "('cpu:1', 'cpu:1')"}, 'offload_to.*expected each o'),
    ('sync', {'strategy.offload_to': "('cpu:1',)"}, 'offload_to .*strategy.name=channel_split, n'),
    ('model_ring', {'strategy.models': '3'}, 'models=3: expected a tup'),
    ('model_ring', {'strategy.models': '()'}, r'^config.strategy.models=\(\).*expected'),
    ('model_ring', {'strategy.models': '(3,)'}, r'^config.strategy.models=\(3,\).*expected'),
    (
      'model_ring',
      _RING | {'strategy.shares': '(1, -1)'},
      r'^config.strategy.shares=\(1, -1\).*expected',
    ),
    ('model_ring', _RING | {'strategy.station': 'rack'}, '^config.strategy.station=.*expected'),
    ('sync', {'strategy.simulate.workers': '3'}, 'workers=3: .* that divides batch_size=16'),
    ('sync', {'strategy.simulate.workers': '-1'}, 'workers=-1: expected 0 or more'),
    ('sync', _WORKERS | {'strategy.simulate.spread': '-0.1'}, 'spread=-0.1: expected 0 or more'),
    ('sync', _WORKERS | {'batch_size': '0'}, 'batch_size=0: expected a'),
    ('local_sgd', _WORKERS | {'strategy.groups': '3'}, 'a multiple of strategy.groups=3'),
    ('invariant', _WORKERS, 'belongs to strategy.name=sync, local_sgd, parameter_server'),
    ('channel_split', _WORKERS, 'belongs to strategy.name=sync, local_sgd, parameter_server'),
    ('local_sgd', {'strategy.rows': '2,1'}, 'config.strategy.rows'),
    *(('sync', {'strategy.rows': rows}, _ROWS) for rows in ('', '0,1', '1.5,1', '2:1', 'fast')),
    ('sync', {'strategy.rows': '2,1', 'model.norm_group': '0'}, _NORM),
    ('invariant', {'strategy.rows': '2,1', 'model.norm_group': '0'}, _NORM),
    *(
      ('invariant', {'strategy.logical_shards': n}, f'logical_shards={n}: expected 2 or more')
      for n in ('0', '1', '-4')
    ),
  ],
)
def test_what_a_strategy_cannot_do_is_refused(name, overrides, message):
  keys = {'strategy.name': name, **overrides}
  builders.assert_refused(message, command_line.load, _TINY, keys)


@pytest.mark.parametrize('name', ['parameter_server', 'channel_split', 'model_ring'])
@pytest.mark.parametrize(
  'files, message',
  [
    (('tls_key',), "tls_key='here.pem': expected both tls_certificate and"),
    (('tls_certificate',), "tls_key='': expected both tls_certificate and"),
    (('tls_certificate', 'tls_key'), "='here.pem': expected a file that exi"),
  ],
)
def test_half_of_what_encrypts_is_refused(name, files, message):
  keys = {f'strategy.{key}': 'here.pem' for key in files}
  keys['strategy.name'] = name
  if name == 'model_ring':
    keys |= _RING
  builders.assert_refused(message, command_line.load, _TINY, keys)
