"""A network for use without training: of a run, or from published weights."""

from flax import traverse_util

from anp_jax import config as config_lib
from anp_jax.checkpoint import trained as trained_lib
from anp_jax.checkpoint.weights import initial, published_weights, weights_source as source_lib
from anp_jax.training import objective as objective_lib


def find(path: str, labels: str) -> tuple[trained_lib.Trained, list[str]]:
  """Reads the network that --checkpoint names.

  Args:
    path: a workdir, a checkpoint in one, or published weights.
    labels: path of the names of the classes of published weights; or ''.

  Returns:
    The network, and lines for people.

  Raises:
    ConfigError: if it cannot be read, or a flag does not belong to it.
  """
  if not published_weights.is_published(path):
    if labels:
      raise config_lib.ConfigError(
        f'--labels={labels!r} is for published weights, and '
        f'{path} is none: a run has the names of its classes'
      )
    return trained_lib.load(path), []
  try:
    return load(path, labels)
  except config_lib.ConfigError as e:
    # To a run these weights are what it begins with.
    text = str(e).replace('config.init.from', '--checkpoint')
    raise config_lib.ConfigError(text) from e


def load(path: str, labels: str = '') -> tuple[trained_lib.Trained, list[str]]:
  """Reads a network that was trained elsewhere.

  Args:
    path: path of a file of weights, of a folder with one, or package:NAME.
    labels: path of the names of the classes, see `published_weights.read_labels`; '':
      those of the folder's config.json, or for 1,000 classes ImageNet's.

  Returns:
    The network, of step 0, and lines for people.

  Raises:
    ConfigError: if the weights cannot be read, or are not a whole network.
  """
  weights = published_weights.read(path)
  vocabulary = published_weights.vocabulary(weights, labels)
  config = config_lib.resolved(config_lib.replaced(config_lib.base(), weights.keys))
  outputs = objective_lib.create(vocabulary, config).head.outputs
  abstract = initial.flat(initial.abstract_variables(config, outputs))
  source = source_lib.read(weights.path, config, abstract)
  meaning = source_lib.outputs(config, vocabulary)
  tensors, _ = initial.match(source, abstract, set(), meaning)
  variables = traverse_util.unflatten_dict(tensors, sep='/')
  notes = [f'{weights.path}: {note}' for note in weights.notes]
  if not labels and not weights.names:
    guess = published_weights.imagenet_names(weights.classes) and ', taken for those of ImageNet'
    notes.append(
      f'{weights.path} does not name its {len(vocabulary)} classes{guess or ""}; '
      '--labels=FILE does, one a line'
    )
  params = variables.pop('params')
  return trained_lib.Trained(weights.path, config, vocabulary, 0, params, variables), notes
