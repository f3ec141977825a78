"""Networks on a CPU with oneDNN: what they name, and what is exported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import models
from anp_jax.checkpoint.weights import exported as program
from anp_jax.predict import network
from anp_jax.system import onednn
from tests import exporting, onednn_here

pytestmark = onednn_here.needed
_CALL = 'anp_onednn'
_BATCH = 8  # an image on each device


def _network(cpu_library, **keys):
  trained = exporting.trained(model__cpu_library=cpu_library, **keys)
  return network.Network(trained, 6, _BATCH)


def _calls(network):
  images = np.zeros((_BATCH, exporting.SIDE, exporting.SIDE, 3), np.uint8)
  lowered = network._program.lower(network._weights, images)
  return lowered.as_text().count(f'custom_call @{_CALL}')


@pytest.mark.slow
def test_prediction_by_onednn_names_what_xla_names():
  images = exporting.images(_BATCH)
  by_library = {}
  for name in ('onednn', 'xla'):
    ours = _network(name)
    # A convolution of each of ResNet-18's first stages at least.
    assert _calls(ours) >= 5 if name == 'onednn' else _calls(ours) == 0
    by_library[name] = ours.names(ours.start(images), _BATCH)
  got, want = by_library.values()
  np.testing.assert_array_equal(got.classes, want.classes)
  # Twenty layers of float32 sums: 1e-6 each.
  np.testing.assert_allclose(got.probabilities, want.probabilities, rtol=2e-5)
  assert len(np.unique(want.probabilities.round(4))) > 6


def test_a_network_trained_with_onednn_needs_none(monkeypatch):
  monkeypatch.setattr(onednn, 'find', lambda: None)
  assert _calls(_network('onednn')) == 0


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_an_evaluation_by_onednn_agrees_with_xlas(dtype):
  if dtype not in onednn.find().dtypes:
    pytest.skip(f'{onednn.find().isa} has no bfloat16')
  logits = {}
  for name in ('onednn', 'xla'):
    trained = exporting.trained(model__cpu_library=name, model__dtype=dtype)
    model = trained.model(models.target(trained.config, 'cpu'))
    pixels = exporting.normalised(trained.config, exporting.images(_BATCH))
    variables = {'params': trained.params, **trained.stats}
    apply = jax.jit(lambda v, x, m=model: m.apply(v, x, False))
    pixels = jnp.asarray(pixels, dtype)
    assert (_CALL in apply.lower(variables, pixels).as_text()) == (name == 'onednn')
    logits[name] = np.float64(apply(variables, pixels))
  got, want = logits.values()
  # bfloat16 rounds at 4e-3 after each of twenty layers, in either way.
  limit = {'float32': 2e-5, 'bfloat16': 0.05}[dtype] * np.abs(want).max()
  np.testing.assert_allclose(got, want, rtol=0, atol=limit)


def test_an_exported_program_calls_nothing_of_onednn():
  trained = exporting.trained(model__cpu_library='auto')
  exported = program.exported(trained, ('cpu', 'tpu'))
  text = exported.mlir_module()
  assert _CALL not in text and 'stablehlo.convolution' in text
  assert _CALL.encode() not in bytes(exported.serialize())
  # The same network, where it is not exported, does call it.
  assert _calls(_network('auto')) > 0
