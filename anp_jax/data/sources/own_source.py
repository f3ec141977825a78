"""A data source of the user's, package.module:Class, whose results are checked."""

import numpy as np

from anp_jax.config import errors
from anp_jax.data import vocabulary
from anp_jax.data.sources import source as source_lib

_FORMS = {'encoded': 'bytes', 'pixels': '(height, width, 3) uint8'}


class OwnSource(source_lib.Wrapper):
  """A source of the user's; what it returns in another form is an error, not read as something."""

  def __init__(self, address: str, source: source_lib.Source):
    """Checks the parts of a source, and its first examples.

    Args:
      address: config.data.source.
      source: object of the user's class.

    Raises:
      ConfigError: if a part is missing, or an example has another form.
    """

    def check(good, words):
      errors.check(good, 'data.source', address, words)

    for part in ('kind', 'vocabulary', 'name', '__len__', 'read', 'labels'):
      is_inherited = getattr(type(source), part, None) is getattr(source_lib.Source, part, None)
      check(part in vars(source) or not is_inherited, f'a class that defines {part}')
    good = isinstance(source.vocabulary, vocabulary.Vocabulary)
    check(good, 'vocabulary to be an anp_jax.data.vocabulary.Vocabulary')
    check(source.kind in _FORMS, f"kind to be 'encoded' or 'pixels', not {source.kind!r}")
    super().__init__(source)
    self._address = address
    first = np.arange(min(2, len(source)))
    try:
      examples = source.read(first)
    except Exception:  # one that is damaged, for which a run reads another
      return
    words = f'images {_FORMS[self.kind]} and integer labels, one for each index'
    check(self._fits(examples, first), f'read({first.tolist()}) to return {words}')

  def read(self, indices: np.ndarray) -> tuple[list, np.ndarray]:
    """Examples of the user's source; ValueError for those of another form."""
    examples = self._source.read(indices)
    if not self._fits(examples, indices):
      raise ValueError(f'no image {_FORMS[self.kind]} with an integer label')
    return examples

  def labels(self) -> np.ndarray:
    """Labels of the user's source; ConfigError for another number of them, or of another type."""
    labels = np.asarray(self._source.labels())
    good = labels.shape == (len(self),) and labels.dtype.kind in 'iu'
    words = f'labels() to return an array of {len(self)} integers'
    errors.check(good, 'data.source', self._address, words)
    return labels

  def identity(self) -> str:
    """The identity of the user's source."""
    return self._source.identity()

  def _fits(self, examples, indices):
    try:
      images, labels = examples
      counts = {len(images), *np.shape(labels), len(indices)}
    except (TypeError, ValueError):  # other parts than two, or parts without a length
      return False
    good = len(counts) == np.ndim(labels) == 1 and np.asarray(labels).dtype.kind in 'iu'
    return good and all(map(self._is_image, images))

  def _is_image(self, image):
    if self.kind == 'encoded':
      return isinstance(image, bytes)
    return getattr(image, 'dtype', None) == np.uint8 and image.shape[2:] == (3,)
