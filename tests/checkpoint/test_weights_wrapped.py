"""Weights as wrappers of PyTorch and version control leave them."""

import numpy as np
import pytest
import safetensors.numpy

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import huggingface, initial, published_weights, weights_source
from tests import exporting

pytestmark = pytest.mark.usefixtures('quick_compiles')


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
  tree = initial.flat({'params': trained.params, **trained.stats})
  weights = weights_source.read(path, trained.config, tree)
  assert set(weights.tensors) == set(tree) and not weights.unused
  for name, value in tree.items():
    np.testing.assert_array_equal(weights.tensors[name][1], value, name)


def test_a_prefix_of_some_names_is_no_wrapper(network, tmp_path):
  tensors = dict(network[1])
  first = sorted(tensors)[0]
  tensors[f'module.{first}'] = tensors[first]
  path = str(tmp_path / 'model.safetensors')
  safetensors.numpy.save_file(tensors, path)
  with published_weights.open_file(path) as file:
    assert set(file.keys()) == set(tensors)


def test_a_file_of_nothing_but_prefixes(tmp_path):
  path = str(tmp_path / 'model.safetensors')
  safetensors.numpy.save_file({'module.': np.zeros(2)}, path)
  with pytest.raises(config_lib.ConfigError, match='its first are'):
    published_weights.read(path)
  safetensors.numpy.save_file({}, path)
  with pytest.raises(config_lib.ConfigError, match='its first are none'):
    published_weights.read(path)


def test_a_pointer_of_git_lfs_is_called_one(tmp_path):
  path = tmp_path / 'model.safetensors'
  path.write_text(
    f'version https://git-lfs.github.com/spec/v1\noid sha256:{"0" * 64}\nsize 46807446\n'
  )
  with pytest.raises(config_lib.ConfigError, match='Git LFS.*git lfs pull'):
    published_weights.read(str(path))
  path.write_text('version of something else')
  with pytest.raises(config_lib.ConfigError, match='cannot be read'):
    published_weights.read(str(path))
