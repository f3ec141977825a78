"""How fast split convolutions are, and what the cost model says of them.

  python -m scripts.study kernel_split
    --config=configs/kernel_split_cifar10.py,configs/kernel_split_cifar10.py:500x1500
    --workdir=runs/split_study --devices=2 --batch_sizes=8,16

trains nothing: for each config, number of devices (processes of this machine, a
core each) and batch size it times whole steps: of one device alone, with the
plan, and with other shares. Beside them stands what the cost model of
`strategy.name=kernel_split` predicts for steps with split convolutions, of
which its calibration timed none: it times convolutions one by one, the step
that is not split, and collectives. Then it predicts the speed-up on up to 32
such devices over links of --bandwidths. --load keeps the last device's core
busy with another process, which takes half of it. --config.KEY=VALUE is for
all; with strategy.helpers the other processes help the first, and nothing is
predicted over links. `python -m scripts.study.split --help` tells how to
measure on other machines. Status 0: all well; 1: a run failed; 2: bad input.
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

from anp_jax import config as config_lib
from anp_jax.config import command_line
from anp_jax.parallel.channel_split import plan as plan_lib
from anp_jax.runtimes.calibration import calibrate
from anp_jax.runtimes.calibration import costs as costs_lib
from scripts.study import grid
from scripts.study import launching
from scripts.study import plots
from scripts.study import split
from scripts.study import table

DEVICES = (1, 2, 4, 8, 16, 32)
_UNITS = {'kbit': 1e3, 'mbit': 1e6, 'gbit': 1e9}
_LATENCY = 50e-6  # seconds a message, of the simulated links


def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  try:
    overrides, rest = command_line.split_overrides(arguments)
    flags = _flags(rest)
    devices = grid.numbers('--devices', flags.devices, 2)
    grid.numbers('--batch_sizes', flags.batch_sizes, 1)
    links = bandwidths(flags.bandwidths)
    configs = [c.strip() for c in flags.config.split(',')]
    for config in configs:
      found = command_line.load(config, overrides)
      if found.strategy.name != 'kernel_split':
        raise config_lib.ConfigError(
          f'config.strategy.name={found.strategy.name!r}: expected kernel_split'
        )
    given = [f'--config.{k}={v}' for k, v in overrides.items()]
    runs = []
    for i, config in enumerate(configs):
      for count in devices:
        with _busy(count) if flags.load else contextlib.nullcontext():
          runs.append(_run(flags, i, config, count, given))
  except config_lib.ConfigError as e:
    print(f'error: {e}'.replace('\n', ' '), file=sys.stderr)
    return 2
  except launching.Failed as e:
    print(f'error: {e}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print('\ninterrupted; the same command begins again')
    return 130
  print(write(flags.workdir, runs, links, arguments))
  return 0


def _flags(arguments):
  parser = command_line.Parser(
    prog='python -m scripts.study kernel_split',
    description=__doc__,
  )
  parser.add_argument('--config', help='FILE[:VARIANT], or several with commas')
  parser.add_argument('--workdir', help='folder of the study')
  parser.add_argument('--devices', default='2', help='processes, as in 2,4')
  parser.add_argument('--batch_sizes', default='32', help='as in 32,64')
  parser.add_argument(
    '--rounds',
    type=int,
    default=split.ROUNDS,
    help='steps of each way (%(default)s)',
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
  if flags.rounds < 1:
    raise config_lib.ConfigError(f'--rounds={flags.rounds}: expected 1 or more')
  return flags


def bandwidths(text: str) -> dict[str, float]:
  """Bytes a second of links, by name; '100mbit,1gbit' as tc has them.

  Raises:
    ConfigError: naming what is no bandwidth.
  """
  found = {}
  for part in map(str.strip, text.split(',')):
    match = re.fullmatch(r'(\d+(?:\.\d+)?)(kbit|mbit|gbit)', part)
    if not match or not float(match[1]):
      raise config_lib.ConfigError(
        f'--bandwidths={text!r}: {part!r} is none; expected such as 100mbit'
      )
    found[part] = float(match[1]) * _UNITS[match[2]] / 8
  return found


def simulated(costs, bandwidth: float) -> list[tuple[int, float]]:
  """(devices, predicted speed-up) on devices like the baseline, in a ring.

  Args:
    costs: measured.
    bandwidth: bytes a second of each device's link.
  """
  mine = costs.baseline
  curve = []
  for count in DEVICES:
    many = dataclasses.replace(
      costs,
      names=(costs.names[mine],) * count,
      whole=(costs.alone,) * count,
      layers={
        path: dataclasses.replace(
          layer, alone=(layer.alone[mine],) * count,
          seconds=(layer.seconds[mine],) * count,
        )
        for path, layer in costs.layers.items()
      },
      link=costs_lib.Link.ring(count, bandwidth, _LATENCY),
    )  # fmt: skip
    curve.append((count, costs.alone / many.step(many.best())))
  return curve


def write(folder: str, runs: list[dict], links, arguments) -> str:
  """Writes study.md and its figures; the tables for a terminal.

  Args:
    folder: of the study.
    runs: from `_run`.
    links: bytes a second, by name.
    arguments: of the command.
  """
  head = ('config', 'devices', 'images', 'split', 'predicted s', 'measured s',
          'off by', 'over one alone', 'of the ideal')  # fmt: skip
  rows, points, ratios = [head], [], {}
  for run in runs:
    for found in run['found']:
      costs = calibrate.from_json(found['costs'], found['helped'])
      ideal = costs.alone / costs.ideal()
      told = set()
      for way in found['ways']:
        if way['plan'] in {plan_lib.NOTHING, plan_lib.APART, *told}:
          continue  # as a step that was timed, or told already
        told.add(way['plan'])
        off = way['predicted'] / way['measured'] - 1
        rows.append(
          (run['name'], str(run['devices']), str(found['batch_size']),
           f'{way["name"]}: {way["plan"]}', f'{way["predicted"]:.3f}',
           f'{way["measured"]:.3f}', f'{100 * off:+.1f} %',
           f'{way["speed_up"]:.2f}', f'{way["speed_up"] / ideal:.3f}')
        )  # fmt: skip
        points.append(
          {**way, 'ideal': ideal, 'devices': run['devices'],
           'config': run['name'], 'batch_size': found['batch_size']}
        )  # fmt: skip
      plan, equal = found['ways'][:2]
      key = f'{run["name"]}_{run["devices"]}x{found["batch_size"]}'
      ratios[key] = {
        'convolution_share': round(costs.share, 4),
        'over_alone': round(plan['speed_up'], 4),
        'of_ideal': round(plan['speed_up'] / ideal, 4),
        'over_equal_shares': round(equal['measured'] / plan['measured'], 4),
      }
  errors = [abs(p['predicted'] / p['measured'] - 1) for p in points]
  ratios['predictions'] = len(errors)
  ratios['within_15_percent'] = sum(e <= 0.15 for e in errors)
  ratios['largest_error'] = round(max(errors), 4)
  curves = {}
  for run in runs:
    for found in run['found']:
      if found['helped']:  # their links are not apart from their work
        continue
      costs = calibrate.from_json(found['costs'])
      title = f'{run["name"]}, {found["batch_size"]} images'
      # Of several numbers of devices the last one's measurements.
      curves[title] = {
        'ideal': [
          (n, 1 / (1 - costs.share + costs.share / n)) for n in DEVICES
        ],
        'links': {name: simulated(costs, b) for name, b in links.items()},
      }
  predicted = [('speed-up on devices like the first', *map(str, DEVICES))]
  for title, curve in curves.items():
    for name, line in {**curve['links'], 'ideal': curve['ideal']}.items():
      predicted.append((f'{title}, {name}', *(f'{s:.2f}' for _, s in line)))
  plots.save(plots.split_steps(points), os.path.join(folder, 'steps.png'))
  if curves:
    plots.save(plots.simulated(curves), os.path.join(folder, 'simulated.png'))
  command = shlex.join(
    ['python', '-m', 'scripts.study', 'kernel_split', *arguments]
  )
  notes = [
    'Predictions are from times of single convolutions, of the step that is '
    'not split and of collectives; measured are whole split steps, the median '
    'of rounds in which each way makes one.',
    'Over one alone: the time of one device, the others idle, over that of '
    'all, in the same round. Ideal: nothing travels, convolutions run at all '
    "devices' rates together, all else at the fastest one's.",
  ]
  if any(found['helped'] for run in runs for found in run['found']):
    notes.append(
      'Of a helper, rates are with what it is sent and gives back, which is '
      'timed with its work.'
    )
  if curves:
    notes.append(
      'Simulated: devices like the fastest one measured, in a ring of links of '
      f'that bandwidth and {1e6 * _LATENCY:.0f} us a message, each with the '
      'plan that is best for it.'
    )
  first, second = (table.markdown(part) for part in (rows, predicted))
  pages = [
    '# Convolutions split over devices', f'    {command}', '\n'.join(first),
    '\n'.join(f'- {n}' for n in notes), '![steps](steps.png)',
  ]  # fmt: skip
  if curves:
    pages += ['\n'.join(second), '![simulated](simulated.png)']
  path = os.path.join(folder, 'study.md')
  with open(path, 'w', encoding='utf-8') as f:
    f.write('\n\n'.join(pages) + '\n')
  return '\n'.join(
    [
      '',
      *first,
      '',
      *(second if curves else []),
      '',
      f'study: {path}',
      json.dumps(ratios),
    ]
  )


def _run(flags, index, config, count, given) -> dict:
  """What the processes of one config and number of devices found."""
  name = config.partition(':')[2] or os.path.basename(config).split('.')[0]
  folder = os.path.join(flags.workdir, f'{index}-{count}')
  shutil.rmtree(folder, ignore_errors=True)
  print(f'{name}, {count} devices: begins', flush=True)
  launching.launch(
    ['-m', 'scripts.study.split'], folder, count,
    [f'--config={config}', f'--workdir={folder}',
     f'--batch_sizes={flags.batch_sizes}', f'--rounds={flags.rounds}',
     *(['--brief'] if flags.brief else []), *given],
    sorted(os.sched_getaffinity(0)),
  )  # fmt: skip
  with open(os.path.join(folder, split.FILE)) as f:
    return {'name': name, 'devices': count, 'found': json.load(f)}


@contextlib.contextmanager
def _busy(devices):
  """A process that computes for ever on the last device's core."""
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
