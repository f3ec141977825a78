"""Tests of train with a workdir in an object store, on a stand-in for GCS."""

import errno
import json
import signal
from unittest import mock

import jax
import numpy as np
import pytest

from anp_jax import cluster, train
from anp_jax.checkpoint import trained
from anp_jax.config import urls
from anp_jax.reporting import telemetry
from anp_jax.system import mirror
from tests import builders, gcs_server, launching, serving

pytestmark = pytest.mark.usefixtures('on_one_device')


def _address(name):
  return f'gs://{gcs_server.BUCKET}/{name}'


def _forget():
  """This process has no mirror, as one on another machine has none."""
  mirror.remove()
  urls.root.cache_clear()


@pytest.fixture(scope='module')
def unbroken(tmp_path_factory):
  """Makes, once, the folder of a run that was never stopped."""
  folder = tmp_path_factory.mktemp('unbroken')

  def run(config):
    if not (folder / 'config.json').exists():
      train.run(config, str(folder))
    return folder

  return run


@pytest.mark.slow
def test_stopped_run_is_resumed_bit_for_bit_and_evaluated(
  gcs, tiny_config, unbroken, tmp_path, monkeypatch, capsys
):
  local = unbroken(tiny_config)
  with monkeypatch.context() as patch:
    builders.signal_at(patch, 5, signal.SIGTERM)
    train.run(tiny_config, _address('stopped'))
  assert 'run the same command to resume' in capsys.readouterr().out
  stopped = json.loads(gcs.objects['stopped/stopped.json'])['step']
  assert 5 <= stopped < 12
  _forget()
  scores = train.run(tiny_config, _address('stopped'))
  out = capsys.readouterr().out
  assert f'continuing from step {stopped} of 12' in out
  assert f'workdir  {_address("stopped")}\n' in out
  assert f'report: {_address("stopped")}/report/index.html' in out
  folder = gcs.write_files('stopped', tmp_path / 'copy')
  serving.same_bits(launching.weights(folder), launching.weights(local))
  for read in (
    lambda f: [r['step'] for r in telemetry.read(str(f))],
    lambda f: sorted(p.name for p in (f / 'report').iterdir()),
    lambda f: (f / 'labels.json').read_text(),
  ):
    assert read(folder) == read(local)
  assert not (folder / 'stopped.json').exists()

  _forget()
  metrics = gcs.generations['stopped/metrics.jsonl']
  assert train.run(tiny_config, _address('stopped'), 'evaluate') == scores
  assert 'stopped/evaluation/12-validation/scores.json' in gcs.objects
  # A run that trains at that time has lines that this process does not know.
  assert gcs.generations['stopped/metrics.jsonl'] == metrics

  for place in ('', '/best'):
    _forget()
    remote = trained.load(_address('stopped') + place)
    expected = trained.load(f'{local}{place}')
    assert (remote.step, remote.vocabulary) == (expected.step, expected.vocabulary)
    jax.tree.map(np.testing.assert_array_equal, remote.params, expected.params)
  step = trained.load(f'{_address("stopped")}/checkpoints/12/')
  assert step.step == 12


@pytest.mark.slow
def test_torn_and_damaged_checkpoints_are_passed_over(gcs, tiny_config, unbroken, tmp_path, caplog):
  local = unbroken(tiny_config)
  tiny_config.checkpoint.every = '2 steps'
  tiny_config.checkpoint.keep = 6
  train.run(tiny_config, _address('torn'))
  gcs.remove('torn/checkpoints/12/commit_success.txt')
  data = [n for n in gcs.objects if n.startswith('torn/checkpoints/10/state/')]
  largest = max(data, key=lambda n: len(gcs.objects[n]))
  content = bytearray(gcs.objects[largest])
  content[len(content) // 2] ^= 255
  gcs.put(largest, bytes(content))
  _forget()
  train.run(tiny_config, _address('torn'))
  assert 'checkpoint 10 is damaged' in caplog.text
  assert f'set aside as {_address("torn")}/damaged/10-' in caplog.text
  assert any(n.startswith('torn/damaged/10-') for n in gcs.objects)
  folder = gcs.write_files('torn', tmp_path / 'copy')
  serving.same_bits(launching.weights(folder), launching.weights(local))


@pytest.mark.parametrize(
  'body, failure', [(False, cluster.RunFailedError), (True, ZeroDivisionError)]
)
def test_the_first_error_is_the_one_that_ends_a_run(monkeypatch, body, failure):
  class Strategy:
    def run(self, invocation, one_model):
      return 1 // (not body)

  gone = mirror.UploadError(errno.EIO, 'the store is gone')
  monkeypatch.setattr(mirror, 'upload', mock.Mock(side_effect=gone))
  monkeypatch.setattr(train.strategy_lib, 'find', lambda _: Strategy())
  with pytest.raises(failure):
    train.run(builders.config({}), 'runs/none')
