"""How fast split convolutions are, compared with the cost model's predictions.

  python -m anp_jax.tools.study channel_split
    --config=configs/channel_split_cifar10.py,configs/channel_split_cifar10.py:500x1500
    --workdir=runs/split_study --devices=2 --batch_sizes=8,16

trains nothing: for each config, number of devices (processes of this machine, a
core each) and batch size it times whole steps: of one device alone, with the
plan, and with other shares. It compares them with the predictions of the cost
model of `strategy.name=channel_split`, which is fitted without steps with split
convolutions: its calibration times single convolutions, the step that is not
split, and collectives. `python -m anp_jax.tools.plan
--strategies=channel_split` predicts other numbers of devices.

With more devices than cores, processes share cores, and their measured speed-up
means nothing. --config.KEY=VALUE applies to all; with strategy.offload_to the
other processes offload for the first.
`python -m anp_jax.tools.study.channel_split_process --help` explains how to measure
on other machines. Status 0: all well; 1: a run failed; 2: bad input.
"""

import json
import os
import shutil
import sys

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, command_line, exits, outputs
from anp_jax.tools.study import channel_split_page, channel_split_process, grid, launching


@exits.with_status('interrupted; run the same command to start again')
def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  try:
    overrides, rest = command_line.split_overrides(arguments)
    flags = _flags(rest)
    devices = grid.numbers('--devices', flags.devices, 2)
    grid.numbers('--batch_sizes', flags.batch_sizes, 1)
    configs = [c.strip() for c in flags.config.split(',')]
    for path in configs:
      channel_split_process.check(command_line.load(path, overrides))
    options = [f'--config.{k}={v}' for k, v in overrides.items()]
    runs = []
    for i, path in enumerate(configs):
      for count in devices:
        folder = os.path.join(flags.workdir, f'{i}-{count}')
        runs += _run(flags, folder, path, count, options)
  except launching.RunFailedError as e:
    print(f'error: {e}', file=sys.stderr)
    return 1
  print(channel_split_page.write(flags.workdir, runs, arguments))
  return 0


def _flags(arguments):
  parser = argument_parser.Parser(
    prog='python -m anp_jax.tools.study channel_split', description=__doc__
  )
  parser.add_argument('--config', help='recipes, FILE[:VARIANT], separated by commas')
  parser.add_argument('--workdir', help='study folder')
  parser.add_argument('--devices', default='2', help='process counts, such as 2,4')
  parser.add_argument('--batch_sizes', default='32', help='batch sizes, such as 32,64')
  parser.add_argument(
    '--rounds',
    type=int,
    default=channel_split_process.ROUNDS,
    help='steps per division (%(default)s)',
  )
  parser.add_argument('--brief', action='store_true', help='equal shares only')
  flags = parser.parse(arguments)
  for name in ('config', 'workdir'):
    if not getattr(flags, name):
      raise config_lib.ConfigError(f'--{name} is missing')
  outputs.check_folder('--workdir', flags.workdir)
  channel_split_process.check_rounds(flags.rounds)
  return flags


def _run(flags, folder, config, count, options) -> list[channel_split_page.Run]:
  """Measures a config on a number of devices."""
  name = config.partition(':')[2] or os.path.basename(config).split('.')[0]
  shutil.rmtree(folder, ignore_errors=True)
  print(f'{name}, {count} devices: begins', flush=True)
  program = ['-m', channel_split_process.__name__]
  arguments = [
    f'--config={config}',
    f'--workdir={folder}',
    f'--batch_sizes={flags.batch_sizes}',
    f'--rounds={flags.rounds}',
    *(['--brief'] if flags.brief else []),
    *options,
  ]
  launching.launch(program, folder, count, arguments)
  crowded = count > len(os.sched_getaffinity(0))
  with open(os.path.join(folder, channel_split_process.FILE)) as f:
    results = json.load(f)
  return [channel_split_page.Run.from_json(name, count, values, crowded) for values in results]
