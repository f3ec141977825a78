"""What a new run begins with instead of random weights.

Every process reads the source, and puts its part of each array where the state
will have it: that is right on any mesh, and for every strategy, whose `start`
makes all of a run's state from one network's.
"""

import dataclasses
import functools
import os

from flax import traverse_util
import jax
import numpy as np

from anp_jax import config as config_lib
from anp_jax import models
from anp_jax.checkpoint import run_dir as workdir_lib
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.checkpoint.weights import naming as naming_lib
from anp_jax.checkpoint.weights import published
from anp_jax.checkpoint.weights import source as source_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.parallel import state as state_lib


@dataclasses.dataclass(frozen=True)
class Matched:
  """A source's tensors beside those of a network.

  Attributes:
    source: `source.Source`.
    loaded: our name to array, cast to the network's dtype.
    initialised: our name to why it begins at random.
    unused: names in the source that the network lacks.
    lines: one for each tensor, for people.
  """

  source: source_lib.Source
  loaded: dict[str, np.ndarray]
  initialised: dict[str, str]
  unused: tuple[str, ...]
  lines: tuple[str, ...]

  def summary(self) -> str:
    """One line for the introduction of a run."""
    initialised = f'{len(self.initialised)} initialised'
    if self.initialised:
      why = '; '.join(
        f'{name.partition("/")[2]}: {text}'
        for name, text in self.initialised.items()
      )
      initialised += f' ({why})'
    return (
      f'weights  {len(self.loaded)} loaded, {initialised}, '
      f'{len(self.unused)} unused of {self.source.path}'
    )


def load(
  config, parts, objective, vocabulary, folder: str = '',
  gather=lambda value: [value], whole: bool = False,
):  # fmt: skip
  """What config.init names, for `state.create`; read by every process.

  Args:
    config: of the run.
    parts: `assembly.Assembly`.
    objective: `objective.Objective`.
    vocabulary: of the training data.
    folder: of the run, where process 0 writes the list of all tensors; '': it
      is not written.
    gather: called with a JSON value, returns that of every process.
    whole: whether a classifier that does not fit is refused, since nothing will
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
  like = flat(
    {'params': parts.abstract_single.params, **parts.abstract_single.stats}
  )
  # Before anything is read: Orbax lets processes wait for each other.
  _agree(published.missing_path(path), gather)
  problem, matched = '', None
  try:
    source = source_lib.read(path, config, like)
    head = classifier(config, objective.outputs)
    outputs = source_lib.outputs(config, vocabulary)
    matched = match(source, like, set() if whole else head, outputs)
  except config_lib.ConfigError as e:
    problem = str(e)
  _agree(problem, gather)
  if folder and jax.process_index() == 0:
    with open(os.path.join(folder, workdir_lib.WEIGHTS_FILE), 'w') as f:
      f.write('\n'.join([matched.summary(), *matched.lines]) + '\n')
  arrays = {
    name: jax.make_array_from_callback(
      value.shape, like[name].sharding, functools.partial(_part, value)
    )
    for name, value in matched.loaded.items()
  }
  return arrays, [matched.summary()]


def vocabulary(config, data) -> vocabulary_lib.Vocabulary:
  """The classes that the weights of config.init.from name.

  Args:
    config: of an evaluation.
    data: vocabulary of its data, which names the classes where the weights do
      not.

  Raises:
    ConfigError: for what cannot be read; where nothing names the classes.
  """
  path = config.init['from']
  if not published.is_published(path):
    return trained_lib.vocabulary(trained_lib.find(path))
  weights = published.read(path)
  if weights.names:
    return published.vocabulary(weights).with_pairs(config.data.pairs)
  if len(data) != weights.classes:
    raise config_lib.ConfigError(
      f'config.init.from={path!r} has {weights.classes} classes without names, '
      f'and the data have {len(data)}: expected as many, or a folder with a '
      f'{published.FILE} and a config.json that names them'
    )
  return data


def match(source, like: dict, head: set[str], outputs) -> Matched:
  """Finds the tensor of a source for each of a network.

  The classifier is loaded where its shape fits; but of a source that says what
  its outputs are, only where they are the run's.

  Args:
    source: `source.Source`.
    like: our name to array or shape.
    head: names of the classifier's tensors.
    outputs: of the run, as of `source.outputs`.

  Raises:
    ConfigError: naming the file, a tensor and both shapes, for one that is
      missing or has another shape and is not the classifier's.
  """
  others = source.outputs is not None and source.outputs != outputs
  loaded, initialised, lines = {}, {}, []
  for name, want in like.items():
    theirs, value = source.tensors.get(name, ('', None))
    shape = tuple(want.shape)
    fits = value is not None and value.shape == shape
    if fits and not (others and name in head):
      loaded[name] = np.asarray(value, want.dtype)
      lines.append(f'loaded       {name} {shape}  {theirs}')
    elif name in head:
      if value is None:
        why = 'none there'
      elif fits:
        why = 'its outputs are others'
      else:
        why = f'{value.shape} there, {shape} here'
      initialised[name] = why
      lines.append(f'initialised  {name} {shape}  {why}')
    else:
      shown = naming_lib.published_shape if theirs != name else _own_shape
      have = (
        'is missing' if value is None
        else f'has shape {shown(name, value.shape)}'
      )  # fmt: skip
      raise config_lib.ConfigError(
        f'config.init.from={source.path!r}: {theirs or name} {have}, expected '
        f'{shown(name, shape)} for {name} of this network'
      )
  unused = tuple(sorted({*source.others, *set(source.tensors) - set(like)}))
  lines += [f'unused       {name}' for name in unused]
  return Matched(source, loaded, initialised, unused, tuple(lines))


def classifier(config, outputs: int) -> set[str]:
  """Names of the tensors whose shape follows the number of a network's outputs.

  Of any network, the user's own too: one with another number is compared.

  Args:
    config: of the run.
    outputs: of its network.
  """
  shapes = []
  for count in (outputs, outputs + 1):
    model = models.create(config, count, 'cpu')
    made = jax.eval_shape(functools.partial(state_lib.variables, model, config))
    shapes.append({name: leaf.shape for name, leaf in flat(made).items()})
  one, other = shapes
  return {name for name in one if one[name] != other.get(name)}


def flat(variables) -> dict:
  """A network's variables by path, such as 'params/head/kernel'."""
  return traverse_util.flatten_dict(variables, sep='/')


def _agree(problem, gather):
  """Raises on all processes what is wrong on one.

  One that stopped alone would leave the others waiting.
  """
  problem = next(filter(None, gather(problem)), '')
  if problem:
    raise config_lib.ConfigError(problem)


def _part(value, index):
  return value[index]


def _own_shape(name, shape):
  del name
  return tuple(shape)
