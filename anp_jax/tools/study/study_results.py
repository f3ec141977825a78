"""The numbers of a study's cells, from the files that their runs left."""

from collections.abc import Callable
import dataclasses
import itertools
import os
from typing import Any

import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import saved_run, strategy as strategy_lib
from anp_jax.reporting import summaries, telemetry
from anp_jax.reporting.run_page import run_tables
from anp_jax.runtimes.parameter_server import log as server_log
from anp_jax.system import files
from anp_jax.tools.study import axes, grid, ring_times

_SIMULATED = 'simulated_seconds'
# Scores of the validation set beyond the accuracy.
SCORES = ('anp_top5', 'adjective_top1', 'noun_top1')
SCALING = 'scaling'  # a column like those of varied keys


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
  """One finished run; of many models, scores are those of the best.

  Attributes:
    images_per_second: rate of all devices, without compiling, evaluation and saves.
    steps: (n,) int, steps of the evaluations.
    samples: (n,) images trained on until then.
    seconds: (n,) training time until then, without pauses; simulated seconds in a study of
      simulated workers, NaN where the run simulates none.
    accuracy: (n,) accuracy on the validation set, 0 to 1.
    staleness: number of updates by staleness; {} where the run does not record it.
    oversubscribed: whether devices shared cores.
    scores: scores of the validation set at the end, 0 to 1, by metric.
    predicted: images/s that the plan of a channel split predicts; None: no plan was measured.
    ideal: speed-up of a channel split over one device without communication; None: unknown.
    ring: times of a run of many models; None of any other.
  """

  images_per_second: float
  steps: np.ndarray
  samples: np.ndarray
  seconds: np.ndarray
  accuracy: np.ndarray
  staleness: dict[int, float] = dataclasses.field(default_factory=dict)
  oversubscribed: bool = False
  scores: dict[str, float] = dataclasses.field(default_factory=dict)
  predicted: float | None = None
  ideal: float | None = None
  ring: ring_times.RingTimes | None = None

  @property
  def end(self) -> float | None:
    """Seconds until the last evaluation; None where they are not known."""
    return _number(self.seconds[-1])

  @property
  def mean_staleness(self) -> float | None:
    """Mean staleness of gradients; None where it is not recorded."""
    count = sum(self.staleness.values())
    total = sum(key * n for key, n in self.staleness.items())
    return total / count if count else None

  @property
  def max_staleness(self) -> int | None:
    """Staleness of the stalest gradient; None where it is not recorded."""
    return max(self.staleness, default=None)

  def spent_to(self, accuracy: float, what: str) -> float | None:
    """`seconds` or `samples` to the first evaluation that reaches an accuracy; None: none does."""
    reached = np.flatnonzero(self.accuracy >= accuracy)
    return _number(getattr(self, what)[reached[0]]) if len(reached) else None


def read(workdir: str, oversubscribed: bool = False, simulated: bool = False) -> Run:
  """Reads the numbers of a finished run.

  The rate leaves out the first interval of the log, which holds what is slow only once, and
  the last one of an emulated run, whose numbers are read a step earlier than the others'.

  Args:
    workdir: folder of the run.
    oversubscribed: whether devices shared cores.
    simulated: whether seconds are those of simulated workers.

  Raises:
    ConfigError: if none of its steps was timed.
  """
  config = saved_run.read(workdir)
  if strategy_lib.declared(config.get('strategy.name', 'sync')).keeps_models_apart:
    return _read_ring(workdir, oversubscribed)
  batch_size = config['batch_size']
  train, validation = run_tables.load(workdir, batch_size)
  timed = [r for r in train if 'images_per_second' in r]
  if not timed:
    raise config_lib.ConfigError('no step was timed; config.duration: expected more than one step')
  counted = timed[1:] or timed
  if config.get('emulate.enabled'):
    counted = counted[:-1] or counted
  images = sum(r['seconds'] * r['images_per_second'] for r in counted)
  steps = np.array([r['step'] for r in validation], int)
  seconds = np.array([r['trained_seconds'] for r in validation])
  if simulated:
    seconds = np.array([r.get(_SIMULATED, np.nan) for r in validation])
  return Run(
    images_per_second=images / sum(r['seconds'] for r in counted),
    steps=steps,
    samples=steps * batch_size,
    seconds=seconds,
    accuracy=np.array([r['anp_top1'] for r in validation]),
    # Of the log: the histograms of the metrics count the stalest together.
    staleness=dict(sorted(server_log.staleness(server_log.read(workdir)).items())),
    oversubscribed=oversubscribed,
    scores=_scores(validation),
    **_split_prediction(workdir, batch_size),
  )


def accuracy(workdir: str) -> float | None:
  """Returns the last accuracy on the validation set; None of a run without one."""
  scored = telemetry.of_kind(workdir, 'validation')
  return scored[-1]['anp_top1'] if scored else None


def _read_ring(workdir, oversubscribed) -> Run:
  times = ring_times.read(workdir)
  records = ring_times.best_scores(workdir, times)
  return Run(
    images_per_second=times.images / times.seconds,
    steps=np.array([r['step'] for r in records]),
    samples=np.array([r['samples'] for r in records]),
    seconds=np.array([r['seconds'] for r in records]),
    accuracy=np.array([r['anp_top1'] for r in records]),
    oversubscribed=oversubscribed,
    scores=_scores(records),
    ring=times,
  )


def _scores(records):
  return {name: records[-1][name] for name in SCORES if records and name in records[-1]}


def _split_prediction(workdir, batch_size) -> dict[str, Any]:
  """What the cost model of a channel split predicted before the first step."""
  saved = files.read_json_object(os.path.join(workdir, 'channel_split.json'))
  if not saved:
    return {}
  from anp_jax.runtimes.calibration import costs as costs_lib  # seconds

  kind = costs_lib.OffloadCosts if saved['key']['helpers'] else costs_lib.Costs
  costs = kind.from_json(saved['costs'])
  return {
    'predicted': batch_size / costs.step_seconds(saved['plan']),
    'ideal': costs.alone / costs.ideal_seconds(),
  }


def _number(value):
  return None if np.isnan(value) else float(value)


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
  """A strategy with its varied keys on a number of nodes, over all seeds.

  Attributes:
    strategy: name in tables and figures.
    nodes: processes.
    devices: devices of each node.
    runs: finished runs by seed.
    failures: reasons of the runs that failed, by the run's name.
    rate: images/s.
    over_device: rate over that of one device with the same strategy and seed.
    over_node: rate over that of one node with as many devices.
    learning_rate: learning rate that its strategy sets or that was tuned; None: neither.
    varied: texts of the varied keys that the runs have, by short name, and `scaling` where
      that is weak.
    simulated: whether its nodes are simulated workers.
  """

  strategy: str
  nodes: int
  devices: int
  runs: dict[int, Run]
  failures: dict[str, str]
  rate: summaries.Summary | None
  over_device: summaries.Summary | None
  over_node: summaries.Summary | None
  learning_rate: float | None
  varied: dict[str, str] = dataclasses.field(default_factory=dict)
  simulated: bool = False

  @property
  def accuracy(self) -> summaries.Summary | None:
    """Accuracy at the end."""
    return self.summarize(lambda run: run.accuracy[-1])

  @property
  def label(self) -> str:
    """Its name in a figure."""
    if not self.simulated:
      return f'{self.series}, {self.nodes} x {self.devices}'
    return f'{self.series}, {self.nodes} workers'

  @property
  def series(self) -> str:
    """The name that it shares with points of other numbers of nodes and devices."""
    return ', '.join([self.strategy, *(f'{k}={v}' for k, v in self.varied.items())])

  @property
  def workers(self) -> int:
    """Simulated workers, or devices on all nodes."""
    return self.nodes if self.simulated else self.nodes * self.devices

  @property
  def oversubscribed(self) -> bool:
    """Whether devices shared cores in any of the runs."""
    return any(r.oversubscribed for r in self.runs.values())

  def summarize(self, value: Callable[[Run], float | None]) -> summaries.Summary | None:
    """Returns the summary of a number of each run, without those that have none."""
    return summaries.summarize(value(r) for r in self.runs.values())


def points(
  cells: list[grid.Cell], runs: dict[grid.Cell, Run], failures: dict[grid.Cell, str]
) -> list[Point]:
  """Puts the seeds of the cells together, in the order of the grid.

  Args:
    cells: all cells of the study.
    runs: numbers of the finished cells.
    failures: reasons of the others.
  """
  # Strategies in their order; `sorted` keeps it.
  kinds = dict.fromkeys((c.label, c.varied, c.weak) for c in cells)
  order = {kind: place for place, kind in enumerate(kinds)}
  names = axes.short_names(dict.fromkeys(key for _, varied, _ in kinds for key, _ in varied))

  def place(cell):
    return (order[cell.label, cell.varied, cell.weak], cell.nodes, cell.devices)

  return [
    _point(list(group), runs, failures, names)
    for _, group in itertools.groupby(sorted(cells, key=place), place)
  ]


def _point(cells, runs, failures, names):
  """The point of cells that differ in the seed only."""
  chosen_cells = [c for c in cells if c in runs]
  first = cells[0]
  # Each has its own best of the tuned values.
  by_place = {dataclasses.replace(c, tuned=()): run for c, run in runs.items()}

  def ratios(nodes, devices):
    changes: dict[str, Any] = {'nodes': nodes, 'devices': devices, 'tuned': ()}
    baselines = [dataclasses.replace(c, **changes) for c in chosen_cells]
    # On one worker, both kinds of scaling are one run.
    baselines = [b if b in by_place else dataclasses.replace(b, weak=False) for b in baselines]
    return summaries.summarize(
      runs[c].images_per_second / by_place[b].images_per_second
      for c, b in zip(chosen_cells, baselines)
      if b in by_place
    )

  return Point(
    first.label,
    first.nodes,
    first.devices,
    {c.seed: runs[c] for c in chosen_cells},
    {c.name: failures[c] for c in cells if c in failures},
    rate=summaries.summarize(runs[c].images_per_second for c in chosen_cells),
    over_device=ratios(1, 1),
    over_node=ratios(1, first.devices),
    learning_rate=None if grid.RATE in dict(first.varied) else first.rate,
    varied={names[key]: text for key, text in first.varied}
    | ({SCALING: 'weak'} if first.weak else {}),
    simulated=first.simulated,
  )


def curve(point: Point) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Returns mean samples (n,), mean seconds (n,) and accuracy (seeds, n).

  They are those of the steps that all seeds have.
  """
  runs = list(point.runs.values())
  steps = set(runs[0].steps).intersection(*(r.steps for r in runs))
  picked = [np.isin(r.steps, list(steps)) for r in runs]
  return (
    runs[0].samples[picked[0]],
    np.mean([r.seconds[p] for r, p in zip(runs, picked)], axis=0),
    np.stack([r.accuracy[p] for r, p in zip(runs, picked)]),
  )
