"""Predicts how a config's training scales on machines that are not here.

  python -m anp_jax.tools.plan --config=configs/resnet_anp.py:modern --device=h200
    --nodes=1,2,4,...,512 --devices_per_node=8 --link=ib-ndr400x8

predicts, for each number of nodes, images/s, the parts of a step's time, memory,
and time and device-hours to the run's end, as a table, as a figure with
--out=FILE.png, and as JSON on the last line.
--strategies=sync,fsdp,local_sgd,parameter_server:async compares strategies;
--config.KEY=VALUE holds for all of them.

  python -m anp_jax.tools.plan --config=... --measure

times some steps of the config on this device, and predicts more of such devices:
up to 64 nodes on 10 Gbit/s Ethernet, unless --nodes and --link say otherwise.

  python -m anp_jax.tools.plan --config=... --target_hours=2 --budget_devices=256

ranks nodes, strategies and (without --device) devices by device-hours.

  python -m anp_jax.tools.plan --config=... --device=h200 --nodes=1,2,4 --mtbf=1000

predicts what runs keep of their images/s when a node fails every 1,000 hours.

  python -m anp_jax.tools.plan --check

compares the model with published rates of ResNet-50: published, predicted, error
and 90 % interval by row, and their means and coverage. docs/planner.md explains
more.

Status 0; 1: nothing reaches the target; 2: bad input, or a config that fits none
of the sizes.
"""

import json
import os
import sys

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, command_line, exits
from anp_jax.reporting import report_kit
from anp_jax.system import xla_flags
from anp_jax.tools import flag_values
from anp_jax.tools.plan import plan_tables, sizes

# A flag, whether it needs or excludes another one, and why.
_OWN_STEPS = "this package's own steps are measured"
_FAILURES = 'it says what follows a failure'
_PAIRS = (
  ('device', 'without', 'measure', 'more of the device at hand are planned'),
  ('data_sheet', 'without', 'measure', _OWN_STEPS),
  ('software', 'without', 'measure', _OWN_STEPS),
  ('measure_batches', 'with', 'measure', 'nothing else is measured'),
  ('repair', 'with', 'mtbf', _FAILURES),
  ('restart_seconds', 'with', 'mtbf', _FAILURES),
  ('elastic_seconds', 'with', 'mtbf', _FAILURES),
  ('mtbf', 'without', 'target_hours', 'a ranking has no failures'),
)
# What a flag that plans nothing takes.
_ALONE = {'check': (), 'list': ('entries',)}


@exits.with_status()
def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  overrides, rest = command_line.split_overrides(arguments)
  flags = _flags(rest)
  if overrides and (flags.check or flags.list):
    raise config_lib.ConfigError(f'--config.{next(iter(overrides))}: not for --check or --list')
  known_tables = plan_tables.load(flags.entries)
  if flags.check:
    return _check()
  if flags.list:
    return _list(known_tables)
  # JAX, once the flags are right.
  from anp_jax.tools.plan import plan_command as planning

  if flags.measure and flags.config:  # a step as main.py compiles it
    applying = command_line.applying(flags.config, overrides)
    xla_flags.enable_for(command_line.load(flags.config, applying))
  return planning.run(known_tables, flags, overrides)


def _flags(arguments):
  parser = argument_parser.Parser(prog='python -m anp_jax.tools.plan', description=__doc__)
  add = parser.add_argument
  add('--config', help='FILE[:VARIANT], and --config.KEY=VALUE')
  add('--device', default='', help='of the table, such as h200; see --list')
  add('--nodes', default='', help='such as 1,2,4 or 1,2,4,...,512')
  add('--devices_per_node', type=int, help="default: 8; --measure: this host's")
  add('--link', default='', metavar='NAMExPORTS', help='ports of a node')
  add('--software', default='anp_jax', help='tuned, anp_jax, framework (default: %(default)s)')
  add('--data_sheet', action='store_true', help="leave out the device's own published rates")
  add('--strategies', default='', help="such as sync,fsdp (default: config's)")
  scaling = f'{", ".join(sizes.SCALINGS)}: constant or growing batch; auto: constant as far as it'
  add('--scaling', default='auto', help=f'{scaling} divides (default: %(default)s)')
  add('--images_per_device', type=int, help='batch size per device for weak scaling')
  rate = "images/s that a node's host decodes; measured: times the config's input here"
  add('--input_rate', help=f'{rate} (default: by its cores)')
  add('--jitter', type=float, help="standard deviation of a step's time over its mean")
  add('--examples', type=int, help='images per epoch')
  add('--classes', type=int, help='number of classes of data that is absent')
  add('--measure', action='store_true', help="time the config's steps on this device first")
  add('--measure_batches', default='', help='two batch sizes to measure: 32,128')
  add('--target_hours', type=float, help='longest run in hours')
  add('--budget_devices', type=int, help='largest number of devices')
  add('--mtbf', type=float, help='mean hours between failures of a node')
  repair = 'mean hours until a failed node is back; 0: never (default: 1)'
  add('--repair', type=float, help=repair)
  again = 'seconds from a noticed loss to the next step of'
  restart, elastic = f'{again} a requeued job', f'{again} the processes that are left'
  add('--restart_seconds', type=float, help=f'{restart} (default: 180)')
  add('--elastic_seconds', type=float, help=f'{elastic} (default: 10)')
  add('--out', default='', metavar='FILE.png', help='output figure')
  add('--check', action='store_true', help='comparison with published rates')
  add('--list', action='store_true', help='table of devices and links')
  entries = 'TOML file with devices and links of yours; see anp_jax/tools/plan/*.toml'
  add('--entries', default='', metavar='FILE', help=entries)
  flags = parser.parse(arguments)
  alone = [
    (name, 'without', mode, 'nothing is planned')
    for mode, partners in _ALONE.items()
    for name in vars(flags)
    if name not in (mode, *partners)
  ]
  flag_values.check_pairs(parser, flags, (*_PAIRS, *alone))
  return flags


def _check() -> int:
  from anp_jax.tools.plan import check, published_rates  # they count with JAX

  comparisons = check.compare(published_rates.read())
  print(check.lines(comparisons))
  print(json.dumps(check.errors(comparisons)))
  return 0


def _list(known_tables) -> int:
  devices = [('device', 'peak TFLOP/s', 'GB', 'GB/s', 'node link', 'source')]
  for d in known_tables.devices.values():
    numbers = (max(d.tflops.values()), d.gigabytes, d.gigabytes_per_second)
    devices.append((d.name, *(f'{n:g}' for n in numbers), d.node_link, d.source))
  links = [('link', 'GB/s', 'us', 'topology')]
  for link in known_tables.links.values():
    links.append((link.name, f'{link.bandwidth / 1e9:g}', f'{1e6 * link.latency:g}', link.topology))
  tables = report_kit.Table(devices, 'lrrrl'), report_kit.Table(links, 'lrrl')
  print(report_kit.plain(tables))
  return 0


def command() -> None:
  """Runs as a program: python -m anp_jax.tools.plan, anp-plan."""
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  if '--measure' not in sys.argv:  # nothing else needs an accelerator
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  else:
    xla_flags.use_huge_pages()
  sys.exit(main(sys.argv[1:]))


if __name__ == '__main__':
  command()
