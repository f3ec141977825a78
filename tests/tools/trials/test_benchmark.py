"""Tests of --mode=benchmark: what it counts, and that it leaves runs alone."""

import json
import mmap

import numpy as np
import pytest

from anp_jax import config as config_lib, train
from anp_jax.system import memory, stopwatch
from anp_jax.tools import trials
from anp_jax.tools.trials import benchmark
from tests import builders


@pytest.fixture
def quick(monkeypatch):
  monkeypatch.setattr(benchmark, '_ROUNDS', 3)
  monkeypatch.setattr(benchmark, '_ROUND_SECONDS', 0.01)


def _config(config, **keys):
  changes = {
    'model.name': 'tests.user_network:WithoutDropout',
    'model.norm_group': 2,
    'data.image_size': 16,
    'data.resize': 16,
    'log.tensorboard': False,
  }
  return builders.editable(config_lib.replaced(config, changes | keys))


def _flops(images):
  """Forward and both gradients of SmallNet at 16 px; the first has no dx.

  Of 'SAME' convolutions of stride 2 at 16 and 8 px, the last row and column
  of the kernel's taps meet no pixel once.
  """
  conv1 = 2 * (3 * 8 - 1) ** 2 * 3 * 6
  conv2 = 2 * (3 * 4 - 1) ** 2 * 6 * 8
  head = 2 * 8 * 12
  return images * (2 * conv1 + 3 * conv2 + 3 * head)


@pytest.mark.slow
@pytest.mark.usefixtures('quick')
@pytest.mark.parametrize(
  'strategy, count',
  [('sync', 1), ('sync', 4), ('invariant', 2), ('local_sgd', 2), ('channel_split', 1)],
)
def test_the_page_has_every_number(tmp_path, config, monkeypatch, capsys, strategy, count):
  builders.use_devices(monkeypatch, count)
  keys = {'strategy.name': strategy}
  if strategy == 'invariant':
    keys['strategy.threads'] = 8  # as many as pytest has devices
  trials.run(_config(config, **keys), str(tmp_path), 'benchmark')
  values = json.loads((tmp_path / 'benchmark.json').read_text())
  assert (values['devices'], values['strategy']) == (count, strategy)
  for name in ('step', 'with_input'):
    rates = values[name]
    assert 0 < rates['low_quartile'] <= rates['images_per_second']
    assert rates['images_per_second'] <= rates['high_quartile']
    seconds = values['batch_size'] / rates['images_per_second']
    assert rates['seconds_a_step'] == pytest.approx(seconds)
  assert 0 <= values['input_wait'] <= 1
  assert values['flops_a_step'] == _flops(values['batch_size'])
  assert values['mfu'] is None and values['compile_seconds'] > 0
  assert values['memory_peak'] > 2**26
  assert values['input_cost'] is None  # synthetic images cost the host nothing
  page = (tmp_path / 'benchmark.md').read_text()
  out = capsys.readouterr().out
  for text in (page, out):
    assert f'{values["compile_seconds"]:.1f} s' in text
  assert "strategy.name = '" + strategy in page
  assert not (tmp_path / 'checkpoints').exists()


@pytest.mark.usefixtures('quick')
def test_the_page_says_how_many_cores_the_input_needs(tmp_path, config, capsys, monkeypatch):
  builders.use_devices(monkeypatch, 1)
  pixels = np.stack([builders.random_pixels(20, 20, seed) for seed in range(24)])
  arrays = {'train_images': pixels, 'train_labels': np.arange(24) % 12}
  np.savez(tmp_path / 'set.npz', **arrays)
  keys = {'data.source': 'arrays', 'data.path': str(tmp_path / 'set.npz'), 'data.decode': 'fast'}
  trials.run(_config(config, **keys), str(tmp_path), 'benchmark')
  values = json.loads((tmp_path / 'benchmark.json').read_text())
  cores = values['step']['images_per_second'] * sum(values['input_cost'].values())
  assert cores > 0 and f'; {cores:.1f} cores keep up with the step' in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_in_the_workdir_stays_as_it_is(tmp_path, config, monkeypatch, quick):
  builders.use_devices(monkeypatch, 1)
  run_config = _config(config, duration='4 steps')
  train.run(run_config, str(tmp_path))
  before = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
  trials.run(run_config, str(tmp_path), 'benchmark')
  after = {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()}
  assert after.keys() - before.keys() == {tmp_path / 'benchmark.json', tmp_path / 'benchmark.md'}
  assert before.items() <= after.items()


def test_memory_of_a_process_rises_with_an_array():
  memory.reset_peak()
  before = memory.of_process()
  # From the system: malloc may have as much at hand that it was given back.
  with mmap.mmap(-1, 2**26) as pages:
    np.frombuffer(pages, np.uint8)[:] = 1
    assert memory.of_process() - before > 0.9 * 2**26
  assert memory.of_process('VmHWM') - before > 0.9 * 2**26


def test_quartiles_are_numpys():
  values = np.random.default_rng(0).random(9).tolist()
  np.testing.assert_allclose(stopwatch.quartiles(values), np.quantile(values, [0.25, 0.5, 0.75]))
  assert stopwatch.quartiles([2.0]) == (2.0, 2.0, 2.0)
