"""How fast split convolutions are, compared with the cost model's predictions.

  python -m scripts.study channel_split
    --config=configs/channel_split_cifar10.py,configs/channel_split_cifar10.py:500x1500
    --workdir=runs/split_study --devices=2 --batch_sizes=8,16

trains nothing: for each config, number of devices (processes of this machine, a
core each) and batch size it times whole steps: of one device alone, with the
plan, and with other shares. It compares them with the predictions of the cost
model of `strategy.name=channel_split`, which is fitted without steps with split
convolutions: its calibration times single convolutions, the step that is not
split, and collectives. Then it predicts the speed-up on up to 32 such devices
over links of --bandwidths. --load keeps the last device's core busy with
another process, which takes half of it. --config.KEY=VALUE applies to all; with
strategy.offload_to the other processes offload for the first, and nothing is
predicted over links. `python -m scripts.study.channel_split_process --help`
explains how to measure on other machines. Status 0: all well; 1: a run failed;
2: bad input.
"""

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys

from anp_jax import config as config_lib
from anp_jax.config import command_line
from anp_jax.config import emulation_keys
from anp_jax.parallel.channel_split import plan as plan_lib
from anp_jax.runtimes.calibration import costs as costs_lib
from anp_jax.runtimes.calibration import planner
from anp_jax.system import markdown
from scripts.study import channel_split_process
from scripts.study import grid
from scripts.study import launching
from scripts.study import plots

DEVICES = (1, 2, 4, 8, 16, 32)
_LATENCY = 50e-6  # seconds a message, of the simulated links
_HEAD = (
  'config', 'devices', 'images', 'split', 'predicted s', 'measured s',
  'off by', 'over one alone', 'of the ideal',
)  # fmt: skip


def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  try:
    overrides, rest = command_line.split_overrides(arguments)
    flags = _flags(rest)
    devices = grid.numbers('--devices', flags.devices, 2)
    grid.numbers('--batch_sizes', flags.batch_sizes, 1)
    links = bandwidths(flags.bandwidths)
    configs = [c.strip() for c in flags.config.split(',')]
    for path in configs:
      channel_split_process.check(command_line.load(path, overrides))
    options = [f'--config.{k}={v}' for k, v in overrides.items()]
    runs = []
    for i, path in enumerate(configs):
      for count in devices:
        with _busy(count) if flags.load else contextlib.nullcontext():
          folder = os.path.join(flags.workdir, f'{i}-{count}')
          runs += _run(flags, folder, path, count, options)
  except config_lib.ConfigError as e:
    print(f'error: {e}'.replace('\n', ' '), file=sys.stderr)
    return 2
  except launching.Failed as e:
    print(f'error: {e}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print('\ninterrupted; run the same command to start again')
    return 130
  print(write(flags.workdir, runs, links, arguments))
  return 0


def _flags(arguments):
  parser = command_line.Parser(
    prog='python -m scripts.study channel_split',
    description=__doc__,
  )
  parser.add_argument('--config', help='FILE[:VARIANT], or several with commas')
  parser.add_argument('--workdir', help='folder of the study')
  parser.add_argument('--devices', default='2', help='processes, as in 2,4')
  parser.add_argument('--batch_sizes', default='32', help='as in 32,64')
  parser.add_argument(
    '--rounds',
    type=int,
    default=channel_split_process.ROUNDS,
    help='steps of each division (%(default)s)',
  )
  parser.add_argument(
    '--brief', action='store_true', help='time the plan and equal shares only'
  )
  parser.add_argument(
    '--bandwidths', default='100mbit,1gbit,10gbit,100gbit',
    help='of simulated links (default: %(default)s)',
  )  # fmt: skip
  parser.add_argument(
    '--load', action='store_true', help="keep the last device's core busy, too"
  )
  flags = parser.parse(arguments)
  for name in ('config', 'workdir'):
    if not getattr(flags, name):
      raise config_lib.ConfigError(f'--{name} is missing')
  command_line.check_folder('--workdir', flags.workdir)
  channel_split_process.check_rounds(flags.rounds)
  return flags


def bandwidths(text: str) -> dict[str, float]:
  """Bytes a second of links, by name; '100mbit,1gbit' as tc writes them.

  Raises:
    ConfigError: naming the part that is no bandwidth.
  """
  links = {}
  for part in map(str.strip, text.split(',')):
    try:
      links[part] = emulation_keys.bytes_per_second(part)
    except ValueError:
      links[part] = 0.0
    if not links[part]:
      raise config_lib.ConfigError(
        f'--bandwidths={text!r}: {part!r} is none; expected such as 100mbit'
      )
  return links


def simulated(costs, bandwidth: float) -> list[tuple[int, float]]:
  """(devices, predicted speed-up) on devices like the baseline, in a ring.

  Args:
    costs: measured.
    bandwidth: bytes a second of each device's link.
  """
  baseline = costs.baseline
  curve = []
  for count in DEVICES:
    ring = dataclasses.replace(
      costs,
      names=(costs.names[baseline],) * count,
      unsplit=(costs.alone,) * count,
      layers={
        path: dataclasses.replace(
          layer, alone=(layer.alone[baseline],) * count,
          seconds=(layer.seconds[baseline],) * count,
        )
        for path, layer in costs.layers.items()
      },
      link=costs_lib.CollectiveCost.ring(count, bandwidth, _LATENCY),
    )  # fmt: skip
    seconds = ring.step_seconds(planner.best_plan(ring))
    curve.append((count, costs.alone / seconds))
  return curve


def write(folder: str, runs: list['Run'], links, arguments) -> str:
  """Writes study.md and its figures; returns the tables for a terminal.

  Args:
    folder: of the study.
    runs: of all configs, numbers of devices and batch sizes.
    links: bytes a second, by name.
    arguments: of the command.
  """
  points = [point for run in runs for point in run.points()]
  # Several runs may have the same title: the last one's measurements count.
  curves = {run.title: run.curves(links) for run in runs if not run.offload}
  plots.save(plots.split_steps(points), os.path.join(folder, 'steps.png'))
  tables = [_steps_table(points)]
  if curves:
    plots.save(plots.simulated(curves), os.path.join(folder, 'simulated.png'))
    tables.append(_curves_table(curves))
  command = shlex.join(
    ['python', '-m', 'scripts.study', 'channel_split', *arguments]
  )
  notes = '\n'.join(f'- {n}' for n in _notes(runs))
  parts = [
    '# Convolutions split over devices', f'    {command}', tables[0], notes,
    '![steps](steps.png)',
    *(f'{t}\n\n![simulated](simulated.png)' for t in tables[1:]),
  ]  # fmt: skip
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
  """

  config: str
  devices: int
  batch_size: int
  costs: costs_lib.Costs
  offload: bool
  steps: list[dict]

  @classmethod
  def from_json(cls, config: str, devices: int, values: dict) -> 'Run':
    """Reads what `channel_split_process.measure` returned."""
    kind = costs_lib.OffloadCosts if values['offload'] else costs_lib.Costs
    costs = kind.from_json(values['costs'])
    return cls(config, devices, **{**values, 'costs': costs})

  @property
  def title(self) -> str:
    """The heading of its simulated speed-ups."""
    return f'{self.config}, {self.batch_size} images'

  @property
  def ideal(self) -> float:
    """The speed-up over one device if communication took no time."""
    return self.costs.alone / self.costs.ideal_seconds()

  def points(self) -> list[dict]:
    """Each plan with split convolutions once, for tables and figures."""
    run = {
      'config': self.config, 'devices': self.devices, 'ideal': self.ideal,
      'batch_size': self.batch_size,
    }  # fmt: skip
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
      'links': {name: simulated(self.costs, b) for name, b in links.items()},
    }


def _steps_table(points) -> str:
  """Measured and predicted steps, in Markdown."""
  rows = [_HEAD]
  for p in points:
    rows.append(
      (p['config'], str(p['devices']), str(p['batch_size']),
       f'{p["name"]}: {p["plan"]}', f'{p["predicted"]:.3f}',
       f'{p["measured"]:.3f}', f'{100 * _error(p):+.1f} %',
       f'{p["speed_up"]:.2f}', f'{p["speed_up"] / p["ideal"]:.3f}')
    )  # fmt: skip
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
  errors = [abs(_error(p)) for p in points]
  ratios['predictions'] = len(errors)
  ratios['within_15_percent'] = sum(e <= 0.15 for e in errors)
  ratios['largest_error'] = round(max(errors), 4)
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
  if any(run.offload for run in runs):
    notes.append("An offload device's rates include its transfers.")
  if not all(run.offload for run in runs):
    notes.append(
      'Simulated: devices like the fastest one measured, in a ring of links of '
      f'that bandwidth and {1e6 * _LATENCY:.0f} us a message, each with the '
      'plan that is best for it.'
    )
  return notes


def _error(point) -> float:
  """The relative error of a prediction."""
  return point['predicted'] / point['measured'] - 1


def _run(flags, folder, config, count, options) -> list[Run]:
  """Measures a config on a number of devices."""
  name = config.partition(':')[2] or os.path.basename(config).split('.')[0]
  shutil.rmtree(folder, ignore_errors=True)
  print(f'{name}, {count} devices: begins', flush=True)
  launching.launch(
    ['-m', channel_split_process.__name__], folder, count,
    [f'--config={config}', f'--workdir={folder}',
     f'--batch_sizes={flags.batch_sizes}', f'--rounds={flags.rounds}',
     *(['--brief'] if flags.brief else []), *options],
    sorted(os.sched_getaffinity(0)),
  )  # fmt: skip
  with open(os.path.join(folder, channel_split_process.FILE)) as f:
    return [Run.from_json(name, count, values) for values in json.load(f)]


@contextlib.contextmanager
def _busy(devices):
  """In this context, a process computes on the last device's core."""
  cores = sorted(os.sched_getaffinity(0))
  core = cores[(devices - 1) % len(cores)]
  if not shutil.which('taskset'):
    raise config_lib.ConfigError('--load: taskset is missing')
  child = subprocess.Popen(
    ['taskset', '-c', str(core), sys.executable, '-c', 'while True: pass']
  )
  try:
    yield
  finally:
    child.terminate()
    child.wait()
