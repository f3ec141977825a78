"""A trained ResNet of a kind that transformers lacks, as a folder for timm."""

import os

import numpy as np
from safetensors import numpy as safetensors_numpy

from anp_jax import models
from anp_jax.checkpoint.weights import families
from anp_jax.checkpoint.weights import naming
from anp_jax.data.input import augment
from anp_jax.models import resnet
from anp_jax.system import files

FILES = ('model.safetensors', 'config.json')
_WIDTH = 64  # of all that timm has


def refusal(config) -> str:
  """Returns why timm has no such network; '' if it has.

  Args:
    config: of the run that trained it.
  """
  m = config.model
  if not models.is_resnet(config):
    return f'{m.name} is no ResNet'
  if resnet.NETWORKS[m.name].get('stem') == 'small':
    return f'timm has no {m.name}'
  if m.width != _WIDTH or m.version != 'v1.5':
    return f"timm's {m.name} has width={_WIDTH} and version='v1.5'"
  if m.head != 'joint':
    return f'it names classes from outputs of their own, not by a {m.head} head'
  return ''


def write(trained, folder: str) -> list[str]:
  """Writes model.safetensors and config.json.

  `timm.create_model('local-dir:FOLDER')` loads them.

  Args:
    trained: `trained.Trained` without a `refusal`.
    folder: that exists.

  Returns:
    The names of the files.
  """
  weights, config = (os.path.join(folder, name) for name in FILES)
  with files.atomic_path(weights) as draft:
    safetensors_numpy.save_file(
      tensors(trained), draft, metadata={'format': 'pt'}
    )
  files.write_json(config, architecture(trained))
  return list(FILES)


def tensors(trained) -> dict[str, np.ndarray]:
  """Returns arrays, float32, by their names in timm."""
  return families.tensors(trained, naming.TORCHVISION)


def architecture(trained) -> dict:
  """Returns the fields of timm's config.json, with the names of the classes."""
  d = trained.config.data
  names = list(trained.vocabulary.names)
  is_deep = resnet.NETWORKS[trained.config.model.name].get('stem') == 'deep'
  return {
    'architecture': trained.config.model.name,
    'num_classes': len(names),
    'label_names': names,
    'pretrained_cfg': {
      'num_classes': len(names),
      'input_size': [3, d.image_size, d.image_size],
      'crop_pct': d.image_size / d.resize,
      'crop_mode': 'center',
      'interpolation': (
        d.decode if d.decode in augment.RESAMPLED else 'bilinear'
      ),
      'mean': [value / 255 for value in d.mean],
      'std': [value / 255 for value in d.std],
      'first_conv': 'conv1.0' if is_deep else 'conv1',
      'classifier': 'fc',
    },
  }
