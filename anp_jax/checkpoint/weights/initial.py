"""The weights that a new run begins with instead of random ones.

Every process reads the source, and puts its shard of each array where the state
will have it: that is right on any mesh, and for every strategy, which makes all
of a run's state from one network's.
"""

from collections.abc import Callable
import functools
import os
from typing import Any

from flax import traverse_util
import jax
import ml_collections
import numpy as np

from anp_jax import config as config_lib, models
from anp_jax.checkpoint import run_dir, trained as trained_lib
from anp_jax.checkpoint.weights import published_weights, weights_source as source_lib
from anp_jax.config import data_keys
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.sources import features
from anp_jax.parallel import state as state_lib
from anp_jax.system import files
from anp_jax.training import build, objective as objective_lib


def load(
  config: ml_collections.ConfigDict,
  program: build.ModelAndSteps,
  vocabulary: vocabulary_lib.Vocabulary,
  folder: str = '',
  gather: Callable[[Any], list] = lambda value: [value],
  exact: bool = False,
) -> tuple[dict[str, jax.Array], list[str]]:
  """Loads what config.init names, for `state.create`; all processes call it.

  Args:
    config: config of the run.
    program: program of the run.
    vocabulary: classes of the training data.
    folder: folder of the run, where process 0 writes the list of all tensors;
      '': it is not written.
    gather: called with a JSON value, returns that of every process.
    exact: whether a classifier that does not fit is refused, since nothing will
      train a new one.

  Returns:
    Name to array, each divided as the network's own; and lines for people. Both
    are empty where a run begins at random.

  Raises:
    ConfigError: on all processes, if on any the source does not fit.
  """
  path = config.init['from']
  if not path:
    return {}, []
  abstract = flat({'params': program.abstract_replica.params, **program.abstract_replica.stats})
  # Before anything is read, so that no process reads what another one lacks.
  _agree(published_weights.missing_path(path), gather)
  problem = ''
  loaded: dict[str, np.ndarray] = {}
  lines: list[str] = []
  try:
    if path.startswith(published_weights.TEXT):
      source = source_lib.of_texts(path, config, abstract, vocabulary.names, exact)
    else:
      source = source_lib.read(path, config, abstract)
    head = set() if exact else classifier(config, vocabulary)
    outputs = source_lib.outputs(config, vocabulary)
    loaded, lines = match(source, abstract, head, outputs)
  except config_lib.ConfigError as e:
    problem = str(e)
  _agree(problem, gather)
  if folder and jax.process_index() == 0:
    files.write_atomic(os.path.join(folder, run_dir.WEIGHTS_FILE), '\n'.join(lines) + '\n')
  arrays = {
    name: jax.make_array_from_callback(value.shape, abstract[name].sharding, value.__getitem__)
    for name, value in loaded.items()
  }
  return arrays, lines[:1]


def vocabulary(
  config: ml_collections.ConfigDict, data: vocabulary_lib.Vocabulary
) -> vocabulary_lib.Vocabulary:
  """Returns the classes that the weights of config.init.from name.

  Args:
    config: config of an evaluation.
    data: classes of its data, which count where the weights name none.

  Raises:
    ConfigError: if the weights cannot be read, or nothing names the classes.
  """
  path, pairs = config.init['from'], config.data.pairs
  if pairs in data_keys.WORDS:  # the classes are words already
    pairs = 'no'
  if path.startswith(published_weights.TEXT):
    names, _ = features.read(path.removeprefix(published_weights.TEXT))
    return vocabulary_lib.Vocabulary(names).with_pairs(pairs)
  if not published_weights.is_published(path):
    return trained_lib.vocabulary(trained_lib.find(path))
  weights = published_weights.read(path)
  named = published_weights.vocabulary(weights)
  is_imagenet = bool(published_weights.imagenet_names(weights.classes))
  if weights.names or (is_imagenet and set(data.names) <= set(named.names)):
    return named.with_pairs(pairs)
  if len(data) != weights.classes:
    raise config_lib.ConfigError(
      f'config.init.from={path!r} has {weights.classes} classes without names, '
      f'and the data have {len(data)}: expected as many, or a folder with a '
      f'{published_weights.FILE} and a config.json that names them'
    )
  return data


def match(
  source: source_lib.Source, abstract: dict, head: set[str], outputs: tuple
) -> tuple[dict[str, np.ndarray], list[str]]:
  """Finds the tensor of a source for each of a network.

  The classifier is loaded where its shape fits; but if a source says what its
  outputs are, only where they are the run's.

  Args:
    source: source of the weights.
    abstract: arrays or shapes of the network by our names.
    head: names of the classifier's tensors.
    outputs: meaning of the run's outputs, see `weights_source.outputs`.

  Returns:
    Arrays by our names, cast to the network's dtype; and lines for people: a summary,
    then one for each tensor.

  Raises:
    ConfigError: naming the file, a tensor and both shapes, for one that is
      missing or has another shape and is not the classifier's.
  """
  other_outputs = source.outputs is not None and source.outputs != outputs
  loaded: dict[str, np.ndarray] = {}
  initialised: list[str] = []
  lines: list[str] = []
  for name, expected in abstract.items():
    source_name, value = source.tensors.get(name, ('', None))
    shape = tuple(expected.shape)
    fits = value is not None and value.shape == shape
    if fits and not (other_outputs and name in head):
      loaded[name] = np.asarray(value, expected.dtype)
      lines.append(f'loaded       {name} {shape}  {source_name}')
      continue
    if name not in head:
      raise _mismatch(source, name, shape)
    if value is None:
      reason = 'none there'
    elif fits:
      reason = 'its outputs are others'
    else:
      reason = f'{value.shape} there, {shape} here'
    initialised.append(f'{name.partition("/")[2]}: {reason}')
    lines.append(f'initialised  {name} {shape}  {reason}')
  unused = sorted({*source.unused, *set(source.tensors) - set(abstract)})
  lines += [f'unused       {name}' for name in unused]
  why = f' ({"; ".join(initialised)})' if initialised else ''
  summary = (
    f'weights  {len(loaded)} loaded, {len(initialised)} initialised{why}, '
    f'{len(unused)} unused of {source.path}'
  )
  return loaded, [summary, *lines]


def classifier(
  config: ml_collections.ConfigDict, vocabulary: vocabulary_lib.Vocabulary
) -> set[str]:
  """Names the tensors whose shape follows the number of a network's outputs.

  This holds for any network, the user's own too: one with another number of
  outputs is compared.
  """
  outputs = objective_lib.create(vocabulary, config).head.outputs
  shapes, other_shapes = (
    {name: leaf.shape for name, leaf in flat(abstract_variables(config, count)).items()}
    for count in (outputs, outputs + 1)
  )
  return {name for name in shapes if shapes[name] != other_shapes.get(name)}


def abstract_variables(config: ml_collections.ConfigDict, outputs: int) -> Any:
  """Returns the variables of a config's network as jax.ShapeDtypeStruct."""
  model = models.create(config, outputs, 'cpu')
  return jax.eval_shape(functools.partial(state_lib.variables, model, config))


def flat(variables: Any) -> dict:
  """Returns a network's variables by path, such as 'params/head/kernel'."""
  return traverse_util.flatten_dict(variables, sep='/')


def _agree(problem, gather):
  """Raises on all processes what is wrong on one.

  One that stopped alone would leave the others waiting.
  """
  problem = next(filter(None, gather(problem)), '')
  if problem:
    raise config_lib.ConfigError(problem)


def _mismatch(source, name, shape):
  """The error for a tensor of the network that the source does not fit."""
  source_name, value = source.tensors.get(name, ('', None))
  problem = 'is missing' if value is None else f'is an array {value.shape} in our order of axes'
  return config_lib.ConfigError(
    f'config.init.from={source.path!r}: {source_name or name} {problem}, '
    f'expected {shape} for {name} of this network'
  )
