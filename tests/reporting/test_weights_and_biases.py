"""Weights & Biases: the same numbers, within the workdir, never in the way."""

import importlib.util
import struct
import sys
import types

import pytest

from anp_jax import config as config_lib
from anp_jax.reporting import weights_and_biases
from tests import builders, launching

_BLOCK = 2**15  # bytes, of LevelDB's log format

# In a process of its own: the package leaves a service and settings behind.
_CODE = """
import sys
from anp_jax.config import command_line
from anp_jax.reporting import step_rates, telemetry, weights_and_biases
config = command_line.load("configs/resnet_anp.py:tiny",
                           {"log.wandb": sys.argv[2], "seed": "271828"})
for first in (0, 20):
  t = telemetry.Telemetry(
    sys.argv[1], step_rates.RunLength(40, 4, 40, first),
    writers=[lambda: weights_and_biases.Writer(sys.argv[1], config)])
  t.train(first + 20, {"loss": 0.8125}, 0.0)
  t.evaluation(first + 20, {"anp_top1": 0.4375})
  t.close()
"""


def _run(workdir, mode, **environment):
  home = workdir.parent / 'home'
  home.mkdir()
  done = launching.python('-c', _CODE, workdir, mode, timeout=180, HOME=str(home), **environment)
  assert done.returncode == 0, done.stderr
  assert not list(home.rglob('*'))
  return done


def _scan(data):
  """Records of LevelDB's log format, which offline files have."""
  place, record = 7, b''
  while place + 7 <= len(data):
    left = _BLOCK - place % _BLOCK
    if left < 7:  # too little for a head
      place += left
      continue
    _, size, kind = struct.unpack_from('<IHB', data, place)
    place += 7 + size
    record += data[place - size : place]
    if kind in (1, 4):  # whole, or the last part
      yield record
      record = b''


def _records(workdir):
  """(id, name to values, config) of each offline file, in order."""
  from wandb.proto import wandb_internal_pb2

  runs = []
  for path in sorted(workdir.glob('wandb/offline-run-*/run-*.wandb')):
    history, run_id, settings = {}, '', ''
    for data in _scan(path.read_bytes()):
      record = wandb_internal_pb2.Record.FromString(data)
      for item in record.history.item:
        name = item.key or '/'.join(item.nested_key)
        history.setdefault(name, []).append(float(item.value_json))
      if record.HasField('run'):
        run_id, settings = record.run.run_id, str(record.run.config)
    runs.append((run_id, history, settings))
  return runs


@pytest.mark.slow
@pytest.mark.parametrize('mode, message', [('offline', ''), ('online', 'cannot be reached')])
def test_offline_files_hold_the_numbers(tmp_path, mode, message):
  """Where there is no server, a run that would send to it goes on and writes them."""
  pytest.importorskip('wandb')
  done = _run(tmp_path / 'work', mode, WANDB_API_KEY='')
  assert message in done.stderr
  first, second = _records(tmp_path / 'work')
  assert first[0] == second[0]  # a run that goes on is the same one
  for (_, history, settings), step in ((first, 20), (second, 40)):
    assert history['train/loss'] == [0.8125]
    assert history['validation/anp_top1'] == [0.4375]
    assert history['_step'] == [step]
    assert '271828' in settings
  assert {p.name for p in tmp_path.iterdir()} == {'work', 'home'}


def test_a_missing_package_is_one_line(config, monkeypatch):
  weights_and_biases.check(config)
  config.log.wandb = 'offline'
  find = importlib.util.find_spec
  monkeypatch.setattr(importlib.util, 'find_spec', lambda n: None if n == 'wandb' else find(n))
  words = 'pip install wandb', 'config.log.wandb'
  builders.assert_refused(words, weights_and_biases.check, config)
  config.log.wandb = 'of'
  builders.assert_refused("'', offline, online", config_lib.resolved, config)


def test_a_package_that_fails_stops_no_run(tmp_path, config, monkeypatch, caplog):
  broken = types.ModuleType('wandb')
  broken.Settings = dict
  broken.init = lambda **_: None  # a run whose methods fail
  monkeypatch.setitem(sys.modules, 'wandb', broken)
  config.log.wandb = 'offline'
  for folder in ('CACHE', 'DATA', 'ARTIFACT'):
    monkeypatch.setenv(f'WANDB_{folder}_DIR', '')
  writer = weights_and_biases.Writer(str(tmp_path), config)
  writer.write('train', 1, {'loss': 1.0})
  writer.close()
  assert not caplog.text
  del broken.init
  config.log.wandb = 'offline'
  writer = weights_and_biases.Writer(str(tmp_path), config)
  writer.write('train', 1, {'loss': 1.0})
  writer.close()
  assert 'gets no metrics' in caplog.text
