"""A trained network as one program that runs with JAX alone."""

import contextlib
import functools
from importlib import resources
import os
import tomllib

import jax
from jax import export, lax
import ml_collections

from anp_jax import config as config_lib
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.input import augment, decode_pillow
from anp_jax.system import files
from anp_jax.training import mixing

NAME = 'model.stablehlo'
FILES = (NAME, 'labels.json', 'preprocessing.json')
# Platforms of jax.export, and what each is to the layers.
PLATFORMS = {'cpu': 'cpu', 'cuda': 'gpu', 'rocm': 'gpu', 'tpu': 'tpu'}
# Settings of JAX under which no path of a source file is in a program.
_PATHLESS = {
  'jax_include_full_tracebacks_in_locations': False,
  'jax_hlo_source_file_canonicalization_regex': '.*',
}


def write(trained: trained_lib.Trained, folder: str, platforms: tuple[str, ...]) -> list[str]:
  """Writes the program, its labels and what it expects of images.

  Args:
    trained: network to export.
    folder: folder that exists.
    platforms: those of PLATFORMS for which the program is lowered.

  Returns:
    The names of the files.
  """
  data = exported(trained, platforms).serialize()
  program, names, images = (os.path.join(folder, name) for name in FILES)
  files.write_atomic(program, bytes(data))
  files.write_json(names, labels(trained.vocabulary))
  files.write_json(images, preprocessing(trained.config))
  return list(FILES)


def exported(trained: trained_lib.Trained, platforms: tuple[str, ...]) -> export.Exported:
  """Exports the program: images (b, size, size, 3) uint8 to a dict of arrays.

  The batch b may have any size. The program normalises the images itself, and
  gives `logits` (b, classes) and the probabilities of `objective.Objective.scores`, all in
  config.model.param_dtype. Each platform's part is lowered as that platform
  computes it best, as in training; only one of them runs.

  Args:
    trained: network to export.
    platforms: some of PLATFORMS.
  """
  config = trained.config
  objective = trained.objective
  variables = {'params': trained.params, **trained.stats}

  def apply(platform, variables, images):
    d, m = config.data, config.model
    images = mixing.normalise(images, d.mean, d.std, m.dtype)
    outputs = trained.model(platform).apply(variables, images, False)
    outputs = outputs.astype(m.param_dtype)
    return {'logits': objective.head.logits(outputs)} | objective.head.scores(outputs)

  branches = {p: functools.partial(apply, PLATFORMS[p]) for p in platforms}

  @jax.jit
  def program(images):
    if len(branches) == 1:
      return apply(PLATFORMS[platforms[0]], variables, images)
    # Operands, so that the weights are in the file once, not once a platform.
    return lax.platform_dependent(variables, images, **branches)

  (batch,) = export.symbolic_shape('b')
  shape, dtype = config_lib.example(config)
  images = jax.ShapeDtypeStruct((batch, *shape), dtype)
  with _without_paths():
    return export.export(program, platforms=platforms)(images)


@contextlib.contextmanager
def _without_paths():
  """A context in which programs tell no folder of this machine.

  What JAX traces it marks with the files and lines that it came from.
  """
  before = {name: getattr(jax.config, name) for name in _PATHLESS}
  try:
    for name, value in _PATHLESS.items():
      jax.config.update(name, value)
    yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)


def labels(vocabulary: vocabulary_lib.Vocabulary) -> dict:
  """Returns names by id: an index of a list, and of the program's results.

  Returns:
    classes, adjectives and nouns; of each class its adjective's and its noun's
    id, empty for plain classes.
  """
  return vocabulary.to_json() | {
    'adjective_of_class': vocabulary.adjective_ids().tolist(),
    'noun_of_class': vocabulary.noun_ids().tolist(),
  }


def preprocessing(config: ml_collections.ConfigDict) -> dict:
  """Returns what a run's evaluation does to an image before the program, and in it."""
  d = config.data
  if widths := d.get('widths', ()):
    return {'input': f'(batch, 1, 1, {sum(widths)}) float32', 'features': list(widths)}
  shrunk = decode_pillow.is_shrunk(config)
  decode = d.decode
  if decode not in augment.RESAMPLED and (shrunk or d.source in decode_pillow.ARRAYS):
    decode = f'{decode} pixels'
  how = tomllib.loads(
    resources.files('anp_jax.checkpoint.weights').joinpath('preparation.toml').read_text()
  )
  return {
    'image_size': d.image_size,
    'resize': d.resize,
    'decode': decode,
    **(how['shrunk'] if shrunk else {}),
    **how[decode],
    **(how['stretched'] if augment.is_stretched(config) else {}),
    'orientation': 'as the pixels are stored; EXIF is not looked at',
    'channels': 'RGB',
    'input': f'(batch, {d.image_size}, {d.image_size}, 3) uint8',
    'mean': list(d.mean),
    'std': list(d.std),
    'normalised': f'by {NAME} itself: (image - mean) / std',
  }
