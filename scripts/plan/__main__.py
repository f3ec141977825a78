"""Predicts how a config's training scales on machines that are not here.

  python -m scripts.plan --check

compares the model with published rates of ResNet-50: published, predicted and
error by row, and the means. With --rows=FILE.csv those of another file, which
has the columns of scripts/plan/published.csv. docs/planner.md explains more.

Status 0; 2: bad input.
"""

import json
import os
import sys

from anp_jax import config as config_lib
from anp_jax.config import command_line
from scripts.plan import tables


def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  try:
    flags = _flags(arguments)
    known_tables = tables.load(flags.entries)
    if flags.check or flags.rows:
      return _check(known_tables, flags)
    raise config_lib.ConfigError('--check is missing')
  except config_lib.ConfigError as e:
    print(f'error: {e}'.replace('\n', ' '), file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print('\ninterrupted')
    return 130


def _flags(arguments):
  parser = command_line.Parser(
    prog='python -m scripts.plan', description=__doc__
  )
  parser.add_argument(
    '--check', action='store_true', help='compare with published rates'
  )
  parser.add_argument(
    '--rows', default='', metavar='FILE', help='for --check: other rates'
  )
  parser.add_argument(
    '--entries', default='', metavar='FILE',
    help='TOML with devices and links of your own; see scripts/plan/*.toml',
  )  # fmt: skip
  return parser.parse(arguments)


def _check(known_tables, flags) -> int:
  from scripts.plan import check  # JAX, once the flags are right
  from scripts.plan import published

  rows = published.read(known_tables, flags.rows or published.FILE)
  comparisons = check.compare(rows)
  print(check.lines(comparisons))
  summary = {k: round(v, 4) for k, v in check.errors(comparisons).items()}
  print(json.dumps(summary))
  return 0


if __name__ == '__main__':
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  sys.exit(main(sys.argv[1:]))
