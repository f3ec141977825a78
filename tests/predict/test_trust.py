"""Looking at somebody's run does not execute their code."""

import json
import sys

import pytest

from anp_jax import __main__ as main, config as config_lib, export
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.config import command_line, saved_run, strategy, trust
from anp_jax.data.sources import tfds_set
from anp_jax.predict import __main__ as predict
from anp_jax.tools.compare import __main__ as compare
from tests import builders

pytestmark = pytest.mark.usefixtures('stranger')

_NAME = 'payload_of_theirs:Net'
_SOURCE = """
import pathlib
from tests import sign_sgd
from tests import user_network

with (pathlib.Path(__file__).parent / 'was_run').open('a') as f:
  f.write('.')


class Net(user_network.PlainNet):
  pass


class Spread(sign_sgd.SignSgd):
  pass
"""
_KEYS = {
  'model.name': _NAME,
  'data.source': 'digits',
  'duration': '2 steps',
  'data.image_size': '16',
  'data.resize': '18',
  'batch_size': '8',
  'log.tensorboard': 'False',
}


@pytest.fixture(scope='module')
def foreign_run(tmp_path_factory):
  """A run of a network of its maker's: (workdir, what its import makes)."""
  root = tmp_path_factory.mktemp('foreign')
  (root / 'payload_of_theirs.py').write_text(_SOURCE)
  sys.path.insert(0, str(root))
  config = command_line.load('configs/resnet_anp.py:tiny', _KEYS)
  builders.train_alone(config, root / 'run')
  yield root / 'run', root / 'was_run'
  sys.path.remove(str(root))


@pytest.fixture
def stranger(foreign_run, monkeypatch):
  """What a fresh process is: nothing is imported or allowed."""
  foreign_run[1].unlink(missing_ok=True)
  sys.modules.pop('payload_of_theirs', None)
  strategy._imported.cache_clear()
  monkeypatch.setattr(trust, '_allowed', set())
  monkeypatch.setattr(trust, '_read', set())
  monkeypatch.setattr(trust, '_is_all_allowed', False)


def _evaluate(workdir):
  return main.main(['main.py', f'--workdir={workdir}', '--mode=evaluate'])


def _predict(workdir):
  return predict.main(['p', f'--checkpoint={workdir}', str(workdir)])


def _export(workdir):
  command = ['e', f'--checkpoint={workdir}', f'--output={workdir}/exported']
  return export.main(command)


@pytest.mark.parametrize('look', [_evaluate, _predict, _export])
def test_nothing_is_imported_that_a_run_names(look, foreign_run, capsys):
  workdir, was_run = foreign_run
  assert look(workdir) == 2
  builders.error_line(capsys, _NAME, '--trust', str(workdir))
  assert not was_run.exists()


@pytest.mark.parametrize(
  'saved',
  [
    {'model.name': _NAME},
    {'strategy.name': 'payload_of_theirs:Spread'},
    {'data.source': 'payload_of_theirs.data:Set'},
    {'model.head': 'payload_of_theirs:Head'},
    {'optimizer.name': 'payload_of_theirs:descent'},
    {'schedule.name': 'payload_of_theirs:schedule'},
    {'strategy.name': 'model_ring', 'strategy.models': [f'model.name={_NAME}']},
    {'strategy.name': 'model_ring', 'strategy.models': [f'seed=1; model.name = {_NAME} ;seed=3']},
  ],
)
def test_each_key_that_names_a_class(saved, foreign_run, tmp_path, capsys):
  config = json.loads((foreign_run[0] / 'config.json').read_text()) | saved
  (tmp_path / 'config.json').write_text(json.dumps(config))
  assert _evaluate(tmp_path) == 2
  builders.error_line(capsys, 'payload_of_theirs', '--trust', f'{tmp_path}/config.json')
  assert compare.main(['c', str(tmp_path), f'--output={tmp_path}/c.html']) == 0
  assert not foreign_run[1].exists()


def test_the_inner_guards_alone(foreign_run, monkeypatch):
  """A reader that forgets to ask still imports nothing."""
  monkeypatch.setattr(trust, 'from_file', lambda saved, *_: saved)
  trained = trained_lib.load(str(foreign_run[0]))
  builders.assert_refused('--trust', trained.model, 'cpu')
  saved = config_lib.flat(trained.config) | {'strategy.name': 'payload_of_theirs:Spread'}
  config = config_lib.from_flat(saved)
  builders.assert_refused('--trust', strategy.find, config)
  builders.assert_refused('--trust', config_lib.resolved, config)
  assert not foreign_run[1].exists()


def _type_again(workdir):
  flags = command_line.main_flags([f'--workdir={workdir}', '--mode=evaluate'], '')
  command_line.from_flags(flags, {'model.name': _NAME})


def _trust(workdir):
  command_line.main_flags([f'--workdir={workdir}', '--trust'], '')


def _trust_in_predict(workdir):
  predict._parse([f'--checkpoint={workdir}', '--trust', 'photo.jpg'])


def _trust_in_export(workdir):
  export._parse([f'--checkpoint={workdir}', '--trust', f'--output={workdir}/new'])


@pytest.mark.parametrize('allow', [_type_again, _trust, _trust_in_predict, _trust_in_export])
def test_what_is_typed_again_or_trusted_is_imported(allow, foreign_run):
  allow(foreign_run[0])
  trained_lib.load(str(foreign_run[0])).model('cpu')
  assert foreign_run[1].read_text() == '.'


@pytest.mark.parametrize('setting', ['auto', ''])
def test_compiled_programs_of_a_run_are_not_used(setting, foreign_run, tmp_path):
  saved = saved_run.read(str(foreign_run[0])) | {'model.name': 'lenet'}
  cache = {'compile_cache.dir': str(tmp_path)}
  read = trust.from_file(saved | cache, 'config.json')
  assert read['compile_cache.dir'] == 'auto'
  read = trust.from_file(saved | {'compile_cache.dir': setting}, 'config.json')
  assert read['compile_cache.dir'] == setting
  trust.allow_all()
  assert trust.from_file(saved | cache, 'c') == saved | cache


@pytest.mark.parametrize(
  'spelling, key',
  [
    ('pythonClassName', 'pythonClassName'),
    ('python\\u0043lassName', 'pythonClassName'),  # what JSON says as well
    ('python_class_name', 'python_class_name'),
    ('type', 'type'),
  ],
)
def test_features_of_a_prepared_set_are_not_imported(spelling, key, foreign_run, tmp_path):
  folder = tmp_path / 'photos' / '1.0.0'
  folder.mkdir(parents=True)
  info = {'name': 'photos', 'version': '1.0.0', 'fileFormat': 'array_record'}
  (folder / 'dataset_info.json').write_text(json.dumps(info))
  features = f'{{"features": {{"x": [{{"{spelling}": "{_NAME}"}}]}}}}'
  features = features.replace(':Net', '.Net')
  assert key in str(json.loads(features))
  (folder / 'features.json').write_text(features)
  line = f'{key}=.*tensorflow_datasets'
  builders.assert_refused(line, tfds_set.open_builder, 'photos', str(tmp_path))
  top = f'{{"{spelling}": "payload_of_theirs.Net", "content": ""}}'
  (folder / 'features.json').write_text(top)
  builders.assert_refused(line, tfds_set.open_builder, 'photos:1.0.0', str(tmp_path))
  assert not foreign_run[1].exists()


def test_only_what_is_needed_asks_for_trust():
  saved = {'data.source': 'payload.of_theirs:Data', 'model.name': 'lenet'}
  assert trust.from_file(saved, 'c', ('model.name',)) == saved
  builders.assert_refused('c: data.source=.*--trust', trust.from_file, saved, 'c')


def test_a_class_in_the_working_directory(tmp_path, monkeypatch):
  """The installed commands start with their own folder on the path, not with this one."""
  (tmp_path / 'my_module_here.py').write_text('def rate(done):\n  return 1 - done\n')
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', [p for p in sys.path if p])
  assert trust.imported('schedule.name', 'my_module_here:rate')(0.25) == 0.75
