"""The page of a study of split convolutions, and what it predicts."""

import dataclasses
import json
import os
import shlex

from anp_jax.parallel.channel_split import split as plan_lib
from anp_jax.runtimes.calibration import costs as costs_lib, planner
from anp_jax.system import markdown
from anp_jax.tools.study import channel_split_process, plots

DEVICES = (1, 2, 3, 4, 8, 16, 32)
_SHARED = '*'
_MEASURED_LINK = 'as measured here'
_LATENCY = 50e-6  # seconds a message, of the simulated links
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


def simulated(costs, bandwidth: float) -> list[tuple[int, float]]:
  """(devices, predicted speed-up) on devices like the baseline, in a ring.

  Args:
    costs: measured.
    bandwidth: bytes a second of each device's link.
  """
  links = [costs_lib.CollectiveCost.ring(n, bandwidth, _LATENCY) for n in DEVICES]
  return [(n, _speed_up(costs, n, x)) for n, x in zip(DEVICES, links)]


def extrapolated(costs, count: int) -> float:
  """The predicted speed-up on devices like the baseline, with links like its.

  In a ring of n devices a collective takes n - 1 messages one after another,
  and each device sends (n - 1) / n of the bytes, or twice both.

  Args:
    costs: measured on two devices or more.
    count: of devices.
  """
  hops = (count - 1) / (len(costs.names) - 1)
  share = hops * len(costs.names) / count
  latency_and_rate = (
    (seconds * hops, per_byte * share)
    for seconds, per_byte in (costs.link.gather, costs.link.total)
  )
  link = costs_lib.CollectiveCost(*latency_and_rate)
  return _speed_up(costs, count, link)


def _speed_up(costs, count, link):
  """The predicted speed-up on devices like the baseline, with the best plan."""
  baseline = costs.baseline
  ring = dataclasses.replace(
    costs,
    # There may be fewer images than devices.
    boundaries=(),
    fixed=(),
    names=(costs.names[baseline],) * count,
    unsplit=(costs.alone,) * count,
    layers={
      path: dataclasses.replace(
        layer, alone=(layer.alone[baseline],) * count, seconds=(layer.seconds[baseline],) * count
      )
      for path, layer in costs.layers.items()
    },
    link=link,
  )
  return costs.alone / ring.step_seconds(planner.best_plan(ring))


def write(folder: str, runs: list['Run'], links, arguments) -> str:
  """Writes study.md and its figures; returns the tables for a terminal.

  Args:
    folder: of the study.
    runs: of all configs, numbers of devices and batch sizes.
    links: bytes a second, by name.
    arguments: of the command.
  """
  points = [point for run in runs for point in run.points(runs)]
  # Several runs may have the same title: the last one's measurements count.
  curves = {r.title: r.curves(links) for r in runs if r.is_extrapolated}
  plots.save(plots.split_steps(points), os.path.join(folder, 'steps.png'))
  tables = [_steps_table(points)]
  if curves:
    plots.save(plots.simulated(curves), os.path.join(folder, 'simulated.png'))
    tables.append(_curves_table(curves))
  command = shlex.join(['python', '-m', 'anp_jax.tools.study', 'channel_split', *arguments])
  notes = '\n'.join(f'- {n}' for n in _notes(runs))
  parts = [
    '# Convolutions split over devices',
    f'    {command}',
    tables[0],
    notes,
    '![steps](steps.png)',
    *(f'{t}\n\n![simulated](simulated.png)' for t in tables[1:]),
  ]
  path = os.path.join(folder, 'study.md')
  with open(path, 'w', encoding='utf-8') as f:
    f.write('\n\n'.join(parts) + '\n')
  ratios = json.dumps(_ratios(runs, points))
  return '\n'.join(['', *(f'{t}\n' for t in tables), f'study: {path}', ratios])


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
  def is_extrapolated(self) -> bool:
    """Whether other numbers of devices are predicted from its measurements."""
    return not self.offload and not self.crowded

  @property
  def title(self) -> str:
    """The heading of its simulated speed-ups."""
    return f'{self.config}, {self.batch_size} images'

  @property
  def ideal(self) -> float:
    """The speed-up over one device if communication took no time."""
    return self.costs.alone / self.costs.ideal_seconds()

  def with_a_core_each(self, runs: list['Run']) -> float | None:
    """The predicted speed-up of the plan if devices did not share cores.

    Args:
      runs: of the study; the largest of the same title that did not is used.

    Returns:
      None where the run is not crowded, or there is no such other run.
    """
    if not self.crowded:
      return None
    uncrowded_runs = [r for r in runs if r.title == self.title and r.is_extrapolated]
    if not uncrowded_runs:
      return None
    largest = max(uncrowded_runs, key=lambda run: run.devices)
    return extrapolated(largest.costs, self.devices)

  def points(self, runs: list['Run'] = ()) -> list[dict]:
    """Each plan with split convolutions once, for tables and figures.

    Args:
      runs: see `with_a_core_each`.
    """
    run = {
      'config': self.config,
      'devices': self.devices,
      'ideal': self.ideal,
      'batch_size': self.batch_size,
      'crowded': self.crowded,
      'with_a_core_each': self.with_a_core_each(runs),
    }
    # A step that splits nothing was timed for the predictions.
    by_plan = {}
    for step in self.steps:
      if step['plan'] not in (plan_lib.NOTHING, plan_lib.APART):
        by_plan.setdefault(step['plan'], {**step, **run})
    return list(by_plan.values())

  def curves(self, links: dict[str, float]) -> dict:
    """(devices, speed-up) of the ideal, and by link."""
    share = self.costs.convolution_share
    return {
      'ideal': [(n, 1 / (1 - share + share / n)) for n in DEVICES],
      'links': {
        **{name: simulated(self.costs, b) for name, b in links.items()},
        _MEASURED_LINK: [(n, extrapolated(self.costs, n)) for n in DEVICES],
      },
    }


def _steps_table(points) -> str:
  """Measured and predicted steps, in Markdown."""
  is_crowded = any(p['crowded'] for p in points)
  rows = [(*_HEAD, 'best plan, a core each') if is_crowded else _HEAD]
  for p in points:
    mark = _SHARED if p['crowded'] else ''
    row = [
      p['config'],
      str(p['devices']),
      str(p['batch_size']),
      f'{p["name"]}: {p["plan"]}',
      f'{p["predicted"]:.3f}',
      f'{p["measured"]:.3f}{mark}',
      f'{100 * _error(p):+.1f} %',
      f'{p["speed_up"]:.2f}{mark}',
      f'{p["speed_up"] / p["ideal"]:.3f}{mark}',
    ]
    if is_crowded:
      speed_up = p['with_a_core_each']
      row.append(f'{speed_up:.2f}' if speed_up else '-')
    rows.append(row)
  return markdown.table(rows, 'lr')


def _curves_table(curves) -> str:
  """Predicted speed-ups by link, in Markdown."""
  rows = [('speed-up on devices like the first', *map(str, DEVICES))]
  for title, curve in curves.items():
    for name, line in {**curve['links'], 'ideal': curve['ideal']}.items():
      rows.append((f'{title}, {name}', *(f'{s:.2f}' for _, s in line)))
  return markdown.table(rows, 'lr')


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
      ratios[f'{run.config}_{run.devices}x{run.batch_size}'] |= {
        'crowded': True,
        'predicted_with_a_core_each': run.with_a_core_each(runs),
      }
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
      'shared them, so these times and speed-ups mean nothing. The last column '
      'is the predicted speed-up over one alone of the best plan for devices '
      'with a core each, from the measurements of fewer devices that had one; '
      '-: there are none.'
    )
  if any(run.offload for run in runs):
    notes.append("An offload device's rates include its transfers.")
  if any(run.is_extrapolated for run in runs):
    notes.append(
      'Simulated: devices like the fastest one measured, in a ring of links of '
      f'that bandwidth and {1e6 * _LATENCY:.0f} us a message, or of links like '
      'those measured, each with the plan that is best for it.'
    )
  return notes


def _error(point) -> float:
  """The relative error of a prediction."""
  return point['predicted'] / point['measured'] - 1
