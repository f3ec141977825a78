"""What the cells of a study show: numbers from their runs' metrics.jsonl."""

import dataclasses
import itertools
import statistics

import numpy as np
from scipy import stats

from anp_jax import config as config_lib
from anp_jax.checkpoint import run_dir as workdir_lib
from anp_jax.reporting import telemetry
from anp_jax.runtimes.parameter_server import log as server_log
from anp_jax.tools.study import axes, grid

_STALENESS = 'staleness_'
_SENT = 'megabytes_per_update'
_SIMULATED = 'simulated_seconds'
# Beyond the accuracy: of the validation set.
SCORES = ('anp_top5', 'adjective_top1', 'noun_top1')
SCALING = 'scaling'  # a column like those of varied keys


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
  """One finished run.

  Attributes:
    images_per_second: over all devices, pauses (compiling, evaluation, saves)
      left out.
    steps: (n,) int, at which the validation set was scored.
    samples: (n,) images trained on until then.
    seconds: (n,) trained until then, without pauses; those of the simulated
      workers in a study of such, NaN where a run simulates none.
    accuracy: (n,) of the validation set, 0 to 1.
    megabytes: sent in a step, by all devices (1e6 bytes); None: not known.
    staleness: updates by staleness; {} where the run does not say.
    crowded: whether its devices had to share cores.
    scores: of the validation set at the end, 0 to 1, by metric.
  """

  images_per_second: float
  steps: np.ndarray
  samples: np.ndarray
  seconds: np.ndarray
  accuracy: np.ndarray
  megabytes: float | None = None
  staleness: dict[int, float] = dataclasses.field(default_factory=dict)
  crowded: bool = False
  scores: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def end(self) -> float | None:
    """Seconds until the last evaluation; None where they are not known."""
    return _number(self.seconds[-1])

  @property
  def mean_staleness(self) -> float | None:
    """Mean staleness of gradients; None where the run does not say."""
    count = sum(self.staleness.values())
    total = sum(key * n for key, n in self.staleness.items())
    return total / count if count else None

  @property
  def max_staleness(self) -> int | None:
    """Staleness of the stalest gradient; None where the run does not say."""
    return max(self.staleness, default=None)

  def reaches(self, accuracy: float) -> bool:
    """Whether an evaluation is as good."""
    return bool(np.any(self.accuracy >= accuracy))

  def seconds_to(self, accuracy: float) -> float | None:
    """Until the first evaluation that is as good; None if there is none."""
    reached = np.flatnonzero(self.accuracy >= accuracy)
    return _number(self.seconds[reached[0]]) if len(reached) else None


def read(workdir: str, crowded: bool = False, simulated: bool = False) -> Run:
  """The numbers of a finished run.

  The first interval of the log is left out of the rate where there are more:
  it holds what is slow only once. So is the last one of an emulated run: its
  numbers are read at once, those of the others a step late, and it is a step
  shorter. A step's time is that of the interval it is
  in, so a run that was stopped and continued has no gap.

  Args:
    workdir: of the run.
    crowded: whether its devices had to share cores.
    simulated: whether seconds are those of simulated workers.

  Raises:
    ConfigError: if none of its steps was timed.
  """
  config = workdir_lib.saved_config(workdir)
  batch_size = config['batch_size']
  lines = {'train': {}, 'validation': {}}
  for record in telemetry.read(workdir):
    lines.setdefault(record['kind'], {})[record['step']] = record
  train = [lines['train'][s] for s in sorted(lines['train'])]
  timed = [r for r in train if 'images_per_second' in r]
  if not timed:
    raise config_lib.ConfigError('no step was timed; config.duration: expected more than one step')
  counted = timed[1:] or timed
  if config.get('emulate.enabled'):
    counted = counted[:-1] or counted
  seconds = sum(r['seconds'] for r in counted)
  images = sum(r['seconds'] * r['images_per_second'] for r in counted)
  # Seconds at the end of each interval; a step's own are alike within it.
  ends = np.array([0] + [r['step'] for r in timed])
  each = [batch_size / r['images_per_second'] for r in timed]
  clock = np.concatenate([[0], np.cumsum(np.diff(ends) * each)])
  steps = np.array(sorted(lines['validation']), int)
  validation = [lines['validation'][s] for s in steps]
  trained = np.interp(steps, ends, clock)
  if simulated:
    trained = np.array([r.get(_SIMULATED, np.nan) for r in validation])
  return Run(
    images_per_second=images / seconds,
    steps=steps,
    samples=steps * batch_size,
    seconds=trained,
    accuracy=np.array([r['anp_top1'] for r in validation]),
    megabytes=_sent(train),
    # The histograms of the metrics count the stalest together.
    staleness=_logged_staleness(workdir) or _staleness(train),
    crowded=crowded,
    scores={name: validation[-1][name] for name in SCORES if validation and name in validation[-1]},
  )


def accuracy(workdir: str) -> float | None:
  """The last accuracy on the validation set; None of a run without one."""
  scored = [r for r in telemetry.read(workdir) if r['kind'] == 'validation']
  return scored[-1]['anp_top1'] if scored else None


def _sent(train):
  """A step's mean: each record's is of the steps since the one before it."""
  ends = [0] + [r['step'] for r in train]
  parts = [(end - start, r[_SENT]) for start, end, r in zip(ends, ends[1:], train) if _SENT in r]
  steps = sum(n for n, _ in parts)
  return sum(n * size for n, size in parts) / steps if parts else None


def _number(value):
  """A float; None of NaN."""
  return None if np.isnan(value) else float(value)


def _logged_staleness(workdir):
  """Gradients by staleness, from the log of an asynchronous run."""
  return dict(sorted(server_log.staleness(server_log.read(workdir)).items()))


def _staleness(train):
  counts = {}
  for record in train:
    for name, value in record.items():
      if name.startswith(_STALENESS) and name[len(_STALENESS) :].isdigit():
        key = int(name[len(_STALENESS) :])
        counts[key] = counts.get(key, 0) + value
  return dict(sorted(counts.items()))


@dataclasses.dataclass(frozen=True)
class Spread:
  """Mean and standard deviation over seeds (of a sample: n - 1).

  Attributes:
    mean: of the values.
    deviation: 0 of a single value.
    count: of the values.
  """

  mean: float
  deviation: float
  count: int

  @property
  def interval(self) -> float | None:
    """Half of the mean's 95 % interval (Student's t); None of one value."""
    if self.count < 2:
      return None
    quantile = stats.t.ppf(0.975, self.count - 1)
    return float(quantile * self.deviation / self.count**0.5)


def spread(values) -> Spread | None:
  """The spread of the numbers that are not None; None if there is none."""
  values = [v for v in values if v is not None]
  if not values:
    return None
  deviation = statistics.stdev(values) if len(values) > 1 else 0.0
  return Spread(statistics.fmean(values), deviation, len(values))


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
  """A strategy with its varied keys on so many nodes, over all seeds.

  Where there are several learning rates, runs are those of the best: most seeds
  at their end, and of these the highest mean accuracy.

  Attributes:
    strategy: its name.
    nodes: processes.
    devices: of each node.
    runs: by seed, the finished ones.
    failures: of all learning rates, the line that says why by the run's name.
    rate: images a second.
    over_device: rate over one device's of the same strategy and seed.
    over_node: rate over one node's, with as many devices.
    accuracy: at the end.
    learning_rate: of the runs; None: the config's own.
    tried: accuracy at the end by learning rate; None where no run ended.
    varied: texts of the varied keys that the runs have, by short name, and
      `scaling` where that is weak.
    simulated: whether its nodes are simulated workers.
  """

  strategy: str
  nodes: int
  devices: int
  runs: dict[int, Run]
  failures: dict[str, str]
  rate: Spread | None
  over_device: Spread | None
  over_node: Spread | None
  accuracy: Spread | None
  learning_rate: float | None
  tried: dict[float | None, Spread | None]
  varied: dict[str, str] = dataclasses.field(default_factory=dict)
  simulated: bool = False

  @property
  def label(self) -> str:
    """What it is called in a figure."""
    if not self.simulated:
      return f'{self.series}, {self.nodes} x {self.devices}'
    return f'{self.series}, {self.nodes} workers'

  @property
  def series(self) -> str:
    """What points of other numbers of nodes and devices have in common."""
    return ', '.join([self.strategy, *(f'{k}={v}' for k, v in self.varied.items())])

  @property
  def workers(self) -> int:
    """Devices on all nodes."""
    return self.nodes * self.devices

  @property
  def crowded(self) -> bool:
    """Whether devices had to share cores in any of the runs."""
    return any(r.crowded for r in self.runs.values())

  @property
  def megabytes(self) -> Spread | None:
    """That a step sends, of the seeds for which it is known."""
    return spread(r.megabytes for r in self.runs.values())

  def over_runs(self, value) -> Spread | None:
    """The spread of what `value` says of a run, of those it says it of."""
    return spread(value(r) for r in self.runs.values())

  def seconds_to(self, accuracy: float) -> Spread | None:
    """Training time to it, of the seeds that reached it."""
    return spread(r.seconds_to(accuracy) for r in self.runs.values())


def points(
  cells: list[grid.Cell], runs: dict[grid.Cell, Run], failures: dict[grid.Cell, str]
) -> list[Point]:
  """The cells' seeds put together, in the order of the grid.

  Args:
    cells: of the study.
    runs: of the cells that are finished.
    failures: of the others.
  """
  # Strategies in their order; `sorted` keeps it.
  kinds = dict.fromkeys((c.strategy, c.varied, c.weak) for c in cells)
  order = {kind: place for place, kind in enumerate(kinds)}
  names = axes.short_names(dict.fromkeys(key for _, varied, _ in kinds for key, _ in varied))

  def place(cell):
    return (order[cell.strategy, cell.varied, cell.weak], cell.nodes, cell.devices)

  return [
    _point(list(group), runs, failures, names)
    for _, group in itertools.groupby(sorted(cells, key=place), place)
  ]


def _point(cells, runs, failures, names):
  """The point of cells that differ in seed and learning rate only."""
  tried = {
    rate: spread(runs[c].accuracy[-1] for c in cells if c.learning_rate == rate and c in runs)
    for rate in dict.fromkeys(c.learning_rate for c in cells)
  }
  varied = {SCALING: 'weak'} if cells[0].weak else {}
  best = max(tried, key=lambda rate: _standing(tried[rate]))
  chosen_cells = [c for c in cells if c.learning_rate == best and c in runs]
  first = cells[0]
  # Each has its own best of the tuned values.
  by_place = {dataclasses.replace(c, tuned=()): run for c, run in runs.items()}

  def ratios(nodes, devices):
    baselines = (
      dataclasses.replace(c, nodes=nodes, devices=devices, tuned=()) for c in chosen_cells
    )
    # Of one worker, both kinds of scaling are one run.
    baselines = [b if b in by_place else dataclasses.replace(b, weak=False) for b in baselines]
    return spread(
      runs[c].images_per_second / by_place[b].images_per_second
      for c, b in zip(chosen_cells, baselines)
      if b in by_place
    )

  return Point(
    first.strategy,
    first.nodes,
    first.devices,
    {c.seed: runs[c] for c in chosen_cells},
    {c.name: failures[c] for c in cells if c in failures},
    rate=spread(runs[c].images_per_second for c in chosen_cells),
    over_device=ratios(1, 1),
    over_node=ratios(1, first.devices),
    accuracy=tried[best],
    learning_rate=first.rate if best is None else best,
    tried=tried,
    varied={names[key]: text for key, text in first.varied} | varied,
    simulated=first.simulated,
  )


def _standing(accuracy):
  return (accuracy.count, accuracy.mean) if accuracy else (0, 0.0)


def curve(point: Point) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Mean samples, seconds and accuracy (seeds, n) at the steps all seeds have.

  Returns:
    samples (n,), seconds (n,), accuracy (seeds, n).
  """
  runs = list(point.runs.values())
  steps = set(runs[0].steps).intersection(*(r.steps for r in runs))
  picked = [np.isin(r.steps, list(steps)) for r in runs]
  return (
    runs[0].samples[picked[0]],
    np.mean([r.seconds[p] for r, p in zip(runs, picked)], axis=0),
    np.stack([r.accuracy[p] for r, p in zip(runs, picked)]),
  )
