"""Compiles a run's steps for machines that are not here, and compares them.

  python -m anp_jax.tools.portability --config=configs/resnet_anp.py:modern
    --config.data.source=synthetic --config.batch_size=0
    --target=cpu:8 --target=tpu:v5e:2x2 --target=gpu:h200:16x4

Targets are cpu:N, tpu:GENERATION:TOPOLOGY and gpu:CARD:HOSTSxGPUS. The step and
XLA's settings are those of main.py there; each target is compiled in its own
process. The last line is JSON.

Status 0: all compiled, with gradients summed in config.strategy.reduce_dtype or
wider; 1: one did not; 2: bad input. docs/portability.md says what such a
compile cannot tell.
"""

import argparse
import json
import os
import subprocess
import sys

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, command_line, exits, outputs
from anp_jax.tools.portability import compiled_collectives, portability_table, targets


@exits.with_status()
def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  overrides, rest = command_line.split_overrides(arguments)
  flags = _flags(rest)
  chosen = [targets.parse(text) for text in flags.target]
  if not flags.config:
    raise config_lib.ConfigError('--config=FILE[:VARIANT] is missing; see configs/')
  if not chosen:
    raise config_lib.ConfigError('--target is missing, such as cpu:8, tpu:v5e:2x2 or gpu:h200:16x4')
  config = command_line.load(flags.config, overrides)
  if flags.worker:
    print(json.dumps(_inspected(config, chosen[0], flags.dump)))
    return 0
  reports = {t.text: _in_a_process(t, flags, overrides) for t in chosen}
  reasons = list(_reasons(reports))
  for where, reason in reasons:
    print(f'error: {where}: {reason}', file=sys.stderr)
  title = f'{config.model.name}, {config.model.dtype}, {config.strategy.name}'
  compiled = {name: r for name, r in reports.items() if 'why_not' not in r}
  rows = portability_table.rows(compiled)
  if compiled:
    print('\n'.join(portability_table.lines(title, rows, list(compiled))))
  differs = [name for name, *cells in rows if len(set(cells)) > 1]
  print(json.dumps({'targets': reports, 'differs': differs}))
  return 1 if reasons else 0


def _reasons(reports):
  """Yields (place, reason) of everything that failed or sums gradients too narrowly."""
  for name, result in reports.items():
    for step in ('', 'train', 'eval'):
      part = result.get(step, {}) if step else result
      place = f'{name} {step}'.strip()
      if 'why_not' in part:
        yield place, part['why_not']
      dtypes = part.get('gradients_asked')
      if dtypes and part.get('gradients_compiled') == []:
        yield place, f'the compiled program has no sum of gradients in {", ".join(dtypes)}'
      named = result.get('named_dtype')
      for dtype in part.get('gradients_compiled', ()):
        # A CPU's are wider than bfloat16, which costs time and no digits.
        if compiled_collectives.width(dtype) < compiled_collectives.width(named):
          yield (
            place,
            f'gradients are summed in {dtype}, but config.strategy.reduce_dtype={named!r}',
          )


def _flags(arguments):
  parser = argument_parser.Parser(prog='python -m anp_jax.tools.portability', description=__doc__)
  parser.add_argument('--config', help='recipe, FILE[:VARIANT], with any --config.KEY=VALUE')
  parser.add_argument('--target', action='append', default=[])
  parser.add_argument('--dump', default='', metavar='DIR', help="folder for the programs' texts")
  parser.add_argument('--worker', action='store_true', help=argparse.SUPPRESS)
  flags = parser.parse(arguments)
  if flags.dump:
    outputs.check_folder('--dump', flags.dump)
  return flags


def _in_a_process(target, flags, overrides) -> dict:
  """What `_inspected` returns in a process of its own, so that no target ends the others."""
  try:
    targets.check_plugin(target)
  except targets.CompilerMissingError as e:
    return {'why_not': str(e)}
  print(f'compiling for {target.text}', file=sys.stderr, flush=True)
  command = [sys.executable, '-m', 'anp_jax.tools.portability', '--worker']
  command += [f'--config={flags.config}', f'--target={target.text}']
  command += command_line.typed(overrides)
  done = subprocess.run(
    [*command, f'--dump={flags.dump}'], capture_output=True, text=True, check=False
  )
  last = (done.stdout.splitlines() or [''])[-1]
  if done.returncode or not last.startswith('{'):
    last_line = (done.stderr.strip().splitlines() or [''])[-1]
    return {'why_not': f'ended with status {done.returncode}: {last_line}'}
  return json.loads(last)


def _inspected(config, target, folder) -> dict:
  """What `ahead.inspect` returns, or why nothing could be compiled."""
  targets.prepare(target, config)
  from anp_jax.tools.portability import ahead  # JAX, once it is told of the target

  try:
    return ahead.inspect(config, target, folder)
  except (config_lib.ConfigError, targets.CompilerMissingError, RuntimeError) as e:
    return {'why_not': portability_table.one_line(e)}


if __name__ == '__main__':
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  sys.exit(main(sys.argv[1:]))
