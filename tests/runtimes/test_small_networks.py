"""Depthwise, grouped and gated networks under `model_ring` and `parameter_server`."""

import json

import jax
import pytest

from anp_jax import train
from tests import launching, model_rings, serving, small_networks

pytestmark = pytest.mark.usefixtures('quick_compiles')


@pytest.mark.soak
def test_models_of_a_ring_end_as_if_alone(tmp_path, monkeypatch):
  devices = jax.devices()[:2]
  monkeypatch.setattr(jax, 'local_devices', lambda: devices)
  models = tuple(f'model.name={name}' for name in small_networks.NAMES)
  config = model_rings.config(models)
  train.run(config, str(tmp_path))
  sizes = json.loads((tmp_path / 'model_ring.json').read_text())['parts']
  assert len(sizes) == 2
  model_rings.assert_same(tmp_path, config, sizes, range(len(models)))


@pytest.mark.soak
@pytest.mark.parametrize('name', small_networks.NAMES)
def test_replay_of_three_workers_has_the_same_bits(tmp_path, config, monkeypatch, name):
  serving.on_devices(monkeypatch, 1)
  keys = {**serving.FULL, 'model.name': name}
  config = serving.config_of(config, **keys)
  serving.run(config, tmp_path, 3)
  saved = launching.weights(tmp_path)
  serving.same_bits(saved, serving.replayed(config, tmp_path, 12))
