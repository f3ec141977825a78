"""Files of weights as torchvision and transformers write them."""

import json

from flax import traverse_util
import numpy as np
from safetensors import numpy as safetensors_numpy

from anp_jax.checkpoint.weights import weights_source

CLASSES = 3
# https://pytorch.org/vision/stable/models.html, times 255.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
CONVNEXT = {
  'crop_pct': 0.875,
  'do_normalize': True,
  'do_resize': True,
  'size': 224,
  'feature_extractor_type': 'ConvNextFeatureExtractor',
  'resample': 3,
  'image_mean': [0.485, 0.456, 0.406],
  'image_std': [0.229, 0.224, 0.225],
}
BIT = {
  'image_processor_type': 'BitImageProcessor',
  'do_center_crop': True,
  'size': {'shortest_edge': 72},
  'crop_size': {'height': 64, 'width': 64},
  'resample': 2,
  'image_mean': [0.5, 0.25, 0.75],
  'image_std': [0.5, 0.2, 1],
}


def file(directory, stages=(2, 2, 2, 2), layers=2, classifier=True):
  """A file in torchvision's naming, with the tensors that tell the network."""
  shapes = {'conv1.weight': (5, 3, 7, 7), 'bn1.weight': (5,)}
  for i, blocks in enumerate(stages, 1):
    for j in range(blocks):
      for k in range(1, layers + 1):
        shapes[f'layer{i}.{j}.conv{k}.weight'] = (1,)
  if classifier:
    shapes['fc.weight'] = (CLASSES, 8)
  tensors = {name: np.zeros(shape, 'f4') for name, shape in shapes.items()}
  path = directory / 'model.safetensors'
  safetensors_numpy.save_file(tensors, path)
  return path


def folder(directory, processor=None, **saved_config):
  """A folder of weights with a config.json, and a processor's file if named."""
  path = file(directory)
  (directory / 'config.json').write_text(json.dumps({'a': 1, **saved_config}))
  if processor is not None:
    text = json.dumps(processor)
    (directory / 'preprocessor_config.json').write_text(text)
  return path


def variables(path, config, shapes):
  """Returns the variables of these shapes that a file holds; each of its tensors is one."""
  flat = traverse_util.flatten_dict(shapes, sep='/')
  source = weights_source.read(str(path), config, flat)
  assert not source.unused
  values = {name: value for name, (_, value) in source.tensors.items()}
  assert {n: v.shape for n, v in values.items()} == {n: s.shape for n, s in flat.items()}
  return traverse_util.unflatten_dict(values, sep='/')


def images(keys):
  """The values of a config by which images are prepared."""
  names = ('image_size', 'resize', 'decode', 'mean', 'std')
  return tuple(keys[f'data.{name}'] for name in names)
