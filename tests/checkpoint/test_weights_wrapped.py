"""Weights as wrappers of PyTorch and version control leave them."""

import pytest
import safetensors.numpy

from anp_jax.checkpoint.weights import huggingface, published_weights
from tests import exporting


@pytest.fixture(scope='module')
def network(tmp_path_factory):
  """A network, and its tensors by their published names."""
  folder = tmp_path_factory.mktemp('weights')
  trained = exporting.trained('resnet18')
  huggingface.write(trained, folder)
  return trained, safetensors.numpy.load_file(folder / 'model.safetensors')


@pytest.mark.parametrize(
  'prefix', ['module.', '_orig_mod.', 'module._orig_mod.', '_orig_mod.module.']
)
def test_names_below_a_wrapper_are_those_without(prefix, network, tmp_path):
  trained, tensors = network
  path = str(tmp_path / 'model.safetensors')
  wrapped = {prefix + name: value for name, value in tensors.items()}
  safetensors.numpy.save_file(wrapped, path)
  assert published_weights.read(path).classes == len(exporting.PAIRS)
  exporting.assert_read_back(trained, path)


def test_a_prefix_of_some_names_is_no_wrapper(network, tmp_path):
  tensors = dict(network[1])
  first = sorted(tensors)[0]
  tensors[f'module.{first}'] = tensors[first]
  path = str(tmp_path / 'model.safetensors')
  safetensors.numpy.save_file(tensors, path)
  assert set(published_weights.tensors(path)) == set(tensors)
