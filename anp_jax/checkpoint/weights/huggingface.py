"""A trained network as a folder that Hugging Face transformers loads."""

import os

import ml_collections

from anp_jax.checkpoint import trained as trained_lib
from anp_jax.checkpoint.weights import efficientnet_names, families, naming, processors
from anp_jax.data.input import augment, decode_pillow
from anp_jax.models import resnet
from anp_jax.system import files

_RESNETS = [f'resnet{depth}' for depth in resnet.DEPTHS]
FILES = ('model.safetensors', 'config.json', 'preprocessor_config.json')


def refusal(config: ml_collections.ConfigDict) -> str:
  """Returns why transformers has no such network as a run's; '' if it has."""
  m = config.model
  family = families.of_config(config)
  if not family:
    return f'{m.name} is no {families.names()}'
  if naming.TRANSFORMERS not in family.namings:
    return f'transformers has no {m.name}'
  if family is families.RESNET and m.name not in _RESNETS:
    return f'transformers has {", ".join(_RESNETS)}, and no {m.name}'
  if family is families.EFFICIENTNET and (problem := efficientnet_names.refusal(config)):
    return problem
  if m.head != 'joint':
    return f'it names classes from outputs of their own, not by a {m.head} head'
  return ''


def write(trained: trained_lib.Trained, folder: str) -> list[str]:
  """Writes model.safetensors, config.json and preprocessor_config.json.

  Args:
    trained: network without a `refusal`.
    folder: folder that exists.

  Returns:
    The names of the files.
  """
  weights, config, processor = (os.path.join(folder, name) for name in FILES)
  families.save(trained, naming.TRANSFORMERS, weights)
  files.write_json(config, architecture(trained))
  files.write_json(processor, preprocessor(trained.config))
  return list(FILES)


def architecture(trained: trained_lib.Trained) -> dict:
  """Returns transformers' config, with the names of the classes."""
  family, names = families.of_config(trained.config), trained.vocabulary.names
  assert family
  return {
    **family.architecture(trained.config),
    'num_channels': 3,
    'dtype': 'float32',
    'id2label': {str(i): name for i, name in enumerate(names)},
    'label2id': {name: i for i, name in enumerate(names)},
    'problem_type': 'single_label_classification',
  }


def preprocessor(config: ml_collections.ConfigDict) -> dict:
  """Returns the fields of an image processor of transformers.

  It brings the shorter side, or both, to `resize` pixels and cuts the centre, as ours
  where config.data.decode is bilinear or bicubic. For the other ways to decode
  it is the nearest that transformers has, see `is_approximate`.
  """
  d = config.data
  sides = ('height', 'width') if augment.is_stretched(config) else ('shortest_edge',)
  return {
    'image_processor_type': 'BitImageProcessor',
    'do_convert_rgb': True,
    'do_resize': True,
    'size': dict.fromkeys(sides, d.resize),
    'resample': processors.FILTERS.get(d.decode, processors.FILTERS['bilinear']),
    'do_center_crop': True,
    'crop_size': {'height': d.image_size, 'width': d.image_size},
    'do_rescale': True,
    'rescale_factor': 1 / 255,
    'do_normalize': True,
    'image_mean': [value / 255 for value in d.mean],
    'image_std': [value / 255 for value in d.std],
  }


def is_approximate(config: ml_collections.ConfigDict) -> bool:
  """Returns whether the processor's pixels differ from our evaluation's.

  On photographs of 400 pixels at 64, probabilities of a trained ResNet-18
  differ by 0.025 in the mean, and by up to 0.13, where decode is fast.
  """
  d = config.data
  return d.decode not in augment.RESAMPLED or decode_pillow.is_shrunk(config)
