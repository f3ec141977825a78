"""Speed-up by layer: a batch's time over that of a share of it."""

from collections.abc import Callable, Iterable
import multiprocessing
import os

if __package__:
  from scripts.bench import _common
else:
  import _common

ALONE, AT_ONCE = 'alone', 'at once'
_MEETING_SECONDS = 300
_barrier = None


def images(batch: int, count: int) -> int:
  """The largest of `count` shares of a batch: the last to be ready."""
  return -(-batch // count)


def run_pinned(work: Callable, count: int) -> list:
  """Calls work(index) in so many new processes at once, a core each."""
  context = multiprocessing.get_context('spawn')
  barrier = context.Barrier(count)
  with context.Pool(count, _join, (barrier,)) as pool:
    # All meet at the barrier, so that no process takes two.
    return pool.map(work, range(count), chunksize=1)


def pin(index: int) -> None:
  """Binds this process to the core of an index among those that it has."""
  cores = sorted(os.sched_getaffinity(0))
  os.sched_setaffinity(0, {cores[index]})


def meet() -> None:
  """Waits until all processes of `run_pinned` have come here."""
  _barrier.wait(_MEETING_SECONDS)


def _join(barrier):
  global _barrier
  _barrier = barrier


def speed_ups(times: dict) -> dict[tuple[str, int], dict[str, float]]:
  """Speed-ups by layer over one process with the whole batch.

  Args:
    times: (ALONE or AT_ONCE, count) to the seconds of each layer with a share
      of 1 / count, a dict for each measurement; (ALONE, 1) is the baseline.

  Returns:
    (ALONE or AT_ONCE, count) to the speed-up by layer, medians over medians;
    'all' is the whole step.
  """
  seconds = {way: _medians(rows) for way, rows in times.items()}
  base = seconds[ALONE, 1]
  return {
    way: {layer: base[layer] / row[layer] for layer in base if row.get(layer)}
    for way, row in seconds.items()
  }


def table(times: dict) -> tuple[list[tuple], dict[str, float]]:
  """Rows of a table, and numbers by name, of what `speed_ups` takes."""
  base = _medians(times[ALONE, 1])
  results = speed_ups(times)
  ways = [way for way in results if way != (ALONE, 1)]
  rows = [('layer', '% of the step', *(f'1/{n} {how}' for how, n in ways))]
  ratios = {}
  for layer in sorted(base, key=base.get, reverse=True):
    cells = []
    for how, n in ways:
      value = results[how, n].get(layer)
      cells.append('' if value is None else f'{value:.2f}')
      if value is not None:
        key = f'{layer}_{n}_{how}'.replace(' ', '_')
        ratios[key] = value
    rows.append((layer, f'{100 * base[layer] / base["all"]:.1f}', *cells))
  return rows, ratios


def _medians(rows: Iterable[dict[str, float]]) -> dict[str, float]:
  """Medians by layer, and of their sums."""
  rows = [row | {'all': sum(row.values())} for row in rows]
  names = dict.fromkeys(name for row in rows for name in row)
  return {n: _common.median([row.get(n, 0.0) for row in rows]) for n in names}
