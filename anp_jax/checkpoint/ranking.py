"""Which steps of a run have the best metric."""

_LOWER_IS_BETTER = ('loss',)


def best_mode(metric: str) -> str:
  """Returns 'min' or 'max': which values of a metric are the best."""
  return 'min' if metric in _LOWER_IS_BETTER else 'max'


def sort_key(metric: str, value: float) -> float:
  """Returns a key that sorts values of a metric from the best on."""
  return value if best_mode(metric) == 'min' else -value


class BestSteps:
  """The best steps so far, held in memory.

  A process that looked at the folder of the checkpoints while another writes to
  it would decide for itself.
  """

  def __init__(self, metric: str, size: int):
    """Makes a ranking without steps.

    Args:
      metric: by which steps are compared.
      size: how many are kept.
    """
    self._metric = metric
    self._size = size
    self._keys: dict[int, float] = {}

  def accepts(self, value: float) -> bool:
    """Returns whether a step with this metric would be among the best."""
    if len(self._keys) < self._size:
      return True
    return sort_key(self._metric, value) < max(self._keys.values())

  def add(self, step: int, value: float) -> None:
    """Adds a step, and drops the worst if there are too many."""
    keys = {**self._keys, step: sort_key(self._metric, value)}
    best = sorted(keys, key=keys.get)[: self._size]
    self._keys = {s: keys[s] for s in best}
