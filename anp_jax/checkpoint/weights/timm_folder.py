"""A trained network of a kind that transformers lacks, as a folder for timm."""

import os

import ml_collections

from anp_jax.checkpoint import trained as trained_lib
from anp_jax.checkpoint.weights import families, naming
from anp_jax.data.input import augment
from anp_jax.models import resnet
from anp_jax.system import files

FILES = ('model.safetensors', 'config.json')
_WIDTH = 64  # channels of the first stage of all ResNets that timm has


def refusal(config: ml_collections.ConfigDict) -> str:
  """Returns why timm has no such network as a run's; '' if it has."""
  m, family = config.model, families.of_config(config)
  if family not in (families.RESNET, families.EFFICIENTNET):
    return f'{m.name} is no {families.RESNET.name} or {families.EFFICIENTNET.name}'
  if family is families.RESNET and resnet.NETWORKS[m.name].get('stem') == 'small':
    return f'timm has no {m.name}'
  if family is families.RESNET and (m.width != _WIDTH or m.version != 'v1.5'):
    return f"timm's {m.name} has width={_WIDTH} and version='v1.5'"
  if m.head != 'joint':
    return f'it names classes from outputs of their own, not by a {m.head} head'
  return ''


def write(trained: trained_lib.Trained, folder: str) -> list[str]:
  """Writes model.safetensors and config.json.

  `timm.create_model('local-dir:FOLDER')` loads them.

  Args:
    trained: network without a `refusal`.
    folder: folder that exists.

  Returns:
    The names of the files.
  """
  weights, config = (os.path.join(folder, name) for name in FILES)
  families.save(trained, naming.TIMM, weights)
  files.write_json(config, architecture(trained))
  return list(FILES)


def architecture(trained: trained_lib.Trained) -> dict:
  """Returns the fields of timm's config.json, with the names of the classes."""
  d = trained.config.data
  names = list(trained.vocabulary.names)
  family = families.of_config(trained.config)
  assert family
  table = family.namings[naming.TIMM]
  is_deep = resnet.NETWORKS.get(trained.config.model.name, {}).get('stem') == 'deep'
  first = table.published(f'params/stem_conv{"1" * is_deep}/kernel')
  return {
    'architecture': trained.config.model.name,
    'num_classes': len(names),
    'label_names': names,
    'pretrained_cfg': {
      'num_classes': len(names),
      'input_size': [3, d.image_size, d.image_size],
      'crop_pct': d.image_size / d.resize,
      'crop_mode': 'squash' if augment.is_stretched(trained.config) else 'center',
      'interpolation': (d.decode if d.decode in augment.RESAMPLED else 'bilinear'),
      'mean': [value / 255 for value in d.mean],
      'std': [value / 255 for value in d.std],
      'first_conv': first.removesuffix('.weight'),
      'classifier': table.classifier,
    },
  }
