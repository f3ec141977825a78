"""The page of a study of split convolutions, and what it predicts."""

import dataclasses
import json
import os
import shlex

from anp_jax.parallel.channel_split import split as plan_lib
from anp_jax.reporting import report_kit
from anp_jax.runtimes.calibration import costs as costs_lib
from anp_jax.tools.study import channel_split_process, plots

_SHARED = '*'
_HEAD = (
  'config',
  'devices',
  'images',
  'split',
  'predicted s',
  'measured s',
  'off by',
  'over one alone',
  'of the ideal',
)


def write(folder: str, runs: list['Run'], arguments) -> str:
  """Writes study.md and its figure; returns the table for a terminal.

  Args:
    folder: folder of the study.
    runs: all configs, numbers of devices and batch sizes.
    arguments: arguments of the command.
  """
  points = [point for run in runs for point in run.points()]
  plots.save(plots.split_steps(points), os.path.join(folder, 'steps.png'))
  command = shlex.join(['python', '-m', 'anp_jax.tools.study', 'channel_split', *arguments])
  path = os.path.join(folder, 'study.md')
  table = _steps_table(points)
  report_kit.write(
    path,
    'Convolutions split over devices',
    [
      report_kit.code([command]),
      table,
      report_kit.bullets(_notes(runs)),
      report_kit.Figure('steps', 'steps.png'),
    ],
  )
  ratios = json.dumps(_ratios(runs, points))
  return f'\n{report_kit.plain([table, f"study: {path}"])}\n{ratios}'


@dataclasses.dataclass(frozen=True)
class Run:
  """Measurements of one config, number of devices and batch size.

  Attributes:
    config: its variant's name, or its file's.
    devices: that split.
    batch_size: images a step.
    costs: measured.
    offload: whether the devices but the first are offload devices.
    steps: of each division: name, plan, predicted and measured seconds,
      speed_up; the plan first, then equal shares.
    crowded: whether devices shared cores.
  """

  config: str
  devices: int
  batch_size: int
  costs: costs_lib.Costs
  offload: bool
  steps: list[dict]
  crowded: bool = False

  @classmethod
  def from_json(cls, config: str, devices: int, values: dict, crowded: bool = False) -> 'Run':
    """Reads what `channel_split_process.measure` returned."""
    kind = costs_lib.OffloadCosts if values['offload'] else costs_lib.Costs
    costs = kind.from_json(values['costs'])
    values = {**values, 'costs': costs, 'crowded': crowded}
    return cls(config, devices, **values)

  @property
  def ideal(self) -> float:
    """The speed-up over one device if communication took no time."""
    return self.costs.alone / self.costs.ideal_seconds()

  def points(self) -> list[dict]:
    """Each plan with split convolutions once, for tables and figures."""
    run = {
      'config': self.config,
      'devices': self.devices,
      'ideal': self.ideal,
      'batch_size': self.batch_size,
      'crowded': self.crowded,
    }
    # A step that splits nothing was timed for the predictions.
    by_plan = {}
    for step in self.steps:
      if step['plan'] not in (plan_lib.NOTHING, plan_lib.APART):
        by_plan.setdefault(step['plan'], {**step, **run})
    return list(by_plan.values())


def _steps_table(points) -> report_kit.Table:
  """Measured and predicted steps."""
  rows = [_HEAD]
  for p in points:
    mark = _SHARED if p['crowded'] else ''
    row = (
      p['config'],
      str(p['devices']),
      str(p['batch_size']),
      f'{p["name"]}: {p["plan"]}',
      f'{p["predicted"]:.3f}',
      f'{p["measured"]:.3f}{mark}',
      f'{100 * _error(p):+.1f} %',
      f'{p["speed_up"]:.2f}{mark}',
      f'{p["speed_up"] / p["ideal"]:.3f}{mark}',
    )
    rows.append(row)
  return report_kit.Table(rows)


def _ratios(runs, points) -> dict:
  """The numbers that a study is judged by."""
  ratios = {}
  for run in runs:
    plan, equal = run.steps[:2]
    ratios[f'{run.config}_{run.devices}x{run.batch_size}'] = {
      'convolution_share': round(run.costs.convolution_share, 4),
      'over_alone': round(plan['speed_up'], 4),
      'of_ideal': round(plan['speed_up'] / run.ideal, 4),
      'over_equal_shares': round(equal['measured'] / plan['measured'], 4),
    }
    by_batch = [
      step['measured'] for step in run.steps if step['name'] == channel_split_process.BY_BATCH
    ]
    if by_batch:
      ratios[f'{run.config}_{run.devices}x{run.batch_size}'] |= {
        'over_batch': round(by_batch[0] / plan['measured'], 4)
      }
    if run.crowded:
      ratios[f'{run.config}_{run.devices}x{run.batch_size}'] |= {'crowded': True}
  errors = [abs(_error(p)) for p in points if not p['crowded']]
  ratios['predictions'] = len(errors)
  ratios['within_15_percent'] = sum(e <= 0.15 for e in errors)
  ratios['largest_error'] = round(max(errors, default=0.0), 4)
  return ratios


def _notes(runs) -> list[str]:
  """Explains the tables."""
  notes = [
    'Predictions are from times of single convolutions, of the step that is '
    'not split and of collectives; measured are whole split steps, the median '
    'of rounds in which each division makes one.',
    'Over one alone: the time of one device, the others idle, over that of '
    'all, in the same round. Ideal: communication takes no time, convolutions '
    "run at all devices' rates together, all else at the fastest one's.",
  ]
  if any(run.crowded for run in runs):
    cores = len(os.sched_getaffinity(0))
    notes.append(
      f'{_SHARED} more devices than the {cores} cores of this machine: they '
      'shared them, so these times and speed-ups mean nothing.'
    )
  if any(run.offload for run in runs):
    notes.append("An offload device's rates include its transfers.")
  return notes


def _error(point) -> float:
  """The relative error of a prediction."""
  return point['predicted'] / point['measured'] - 1
