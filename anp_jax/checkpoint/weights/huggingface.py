"""A trained ResNet as a folder that Hugging Face transformers loads."""

import os

from flax import traverse_util
import numpy as np
from safetensors import numpy as safetensors_numpy

from anp_jax import models
from anp_jax.checkpoint.weights import naming
from anp_jax.checkpoint.weights import processors
from anp_jax.data.input import augment
from anp_jax.data.input import decode_pillow
from anp_jax.models import resnet
from anp_jax.system import files

_PREFIX = 'resnet.'
FILES = ('model.safetensors', 'config.json', 'preprocessor_config.json')


def refusal(config) -> str:
  """Returns why transformers has no such network; '' if it has.

  Args:
    config: of the run that trained it.
  """
  m = config.model
  if not models.is_resnet(config):
    return f'{m.name} is no ResNet'
  if m.head != 'joint':
    return f'it names classes from outputs of their own, not by a {m.head} head'
  return ''


def write(trained, folder: str) -> list[str]:
  """Writes model.safetensors, config.json and preprocessor_config.json.

  Args:
    trained: `trained.Trained` without a `refusal`.
    folder: that exists.

  Returns:
    The names of the files.
  """
  weights, config, processor = (os.path.join(folder, name) for name in FILES)
  with files.atomic_path(weights) as draft:
    safetensors_numpy.save_file(
      tensors(trained), draft, metadata={'format': 'pt'}
    )
  files.write_json(config, architecture(trained))
  files.write_json(processor, preprocessor(trained.config))
  return list(FILES)


def tensors(trained) -> dict[str, np.ndarray]:
  """Returns arrays, float32, by their names in transformers."""
  flat = traverse_util.flatten_dict(
    {'params': trained.params, **trained.stats}, sep='/'
  )
  result = {}
  for name, value in flat.items():
    published_name = naming.published_name(name, naming.TRANSFORMERS, _PREFIX)
    value = naming.to_published(name, np.asarray(value, np.float32))
    result[published_name] = np.ascontiguousarray(value)
    if name.endswith('/mean'):
      count = published_name.replace('running_mean', naming.UNUSED)
      result[count] = np.asarray(trained.step, np.int64)
  return result


def architecture(trained) -> dict:
  """Returns the fields of a ResNetConfig, with the names of the classes."""
  m = trained.config.model
  stages, bottleneck = resnet.DEPTHS[int(m.name.removeprefix('resnet'))]
  wider = 4 if bottleneck else 1
  names = trained.vocabulary.names
  return {
    'architectures': ['ResNetForImageClassification'],
    'model_type': 'resnet',
    'num_channels': 3,
    'embedding_size': m.width,
    'hidden_sizes': [m.width * wider * 2**i for i in range(len(stages))],
    'depths': list(stages),
    'layer_type': 'bottleneck' if bottleneck else 'basic',
    'hidden_act': 'relu',
    'downsample_in_first_stage': False,
    'downsample_in_bottleneck': m.version == 'v1',
    'dtype': 'float32',
    'id2label': {str(i): name for i, name in enumerate(names)},
    'label2id': {name: i for i, name in enumerate(names)},
    'problem_type': 'single_label_classification',
  }


def preprocessor(config) -> dict:
  """Returns the fields of an image processor of transformers.

  It brings the shorter side to `resize` pixels and cuts the centre, as ours
  where config.data.decode is bilinear or bicubic. For the other ways to decode
  it is the nearest that transformers has, see `is_approximate`.

  Args:
    config: of the run.
  """
  d = config.data
  return {
    'image_processor_type': 'BitImageProcessor',
    'do_convert_rgb': True,
    'do_resize': True,
    'size': {'shortest_edge': d.resize},
    'resample': processors.FILTERS.get(
      d.decode, processors.FILTERS['bilinear']
    ),
    'do_center_crop': True,
    'crop_size': {'height': d.image_size, 'width': d.image_size},
    'do_rescale': True,
    'rescale_factor': 1 / 255,
    'do_normalize': True,
    'image_mean': [value / 255 for value in d.mean],
    'image_std': [value / 255 for value in d.std],
  }


def is_approximate(config) -> bool:
  """Returns whether the processor's pixels differ from our evaluation's.

  On photographs of 400 pixels at 64, probabilities of a trained ResNet-18
  differ by 0.025 in the mean, and by up to 0.13, where decode is fast.

  Args:
    config: of the run.
  """
  d = config.data
  return d.decode not in augment.RESAMPLED or decode_pillow.is_shrunk(config)
