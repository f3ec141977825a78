"""Compares runs: curves, what differs in their configs, what they reached.

python -m anp_jax.tools.compare runs/first runs/second --output=comparison.html

RUN is a workdir; of a folder that holds workdirs, all of them are compared. The
page is one file that opens anywhere. Runs may be unfinished, and may go on.
"""

from anp_jax.system import interrupts

if __name__ == '__main__':
  interrupts.install()  # all else takes time

import os
import sys

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, exits, outputs


@exits.with_status()
def main(argv: list[str]) -> int:
  """Returns the process's exit status: 0, 2 (bad input), 130 (Ctrl-C)."""
  flags = _parse(argv[1:])
  from anp_jax.tools.compare import comparison_page

  print(comparison_page.write(flags.runs, flags.output))
  print(f'\ncomparison: {flags.output}', flush=True)


def _parse(arguments):
  flags = _parser().parse(arguments)
  if not flags.runs:
    raise config_lib.ConfigError('no run is given: expected workdirs')
  flags.runs = [os.path.expanduser(path) for path in flags.runs]
  flags.output = os.path.expanduser(flags.output)
  outputs.check_file('--output', flags.output, ('.html', '.htm'))
  return flags


def _parser():
  parser = argument_parser.Parser(prog='python -m anp_jax.tools.compare', description=__doc__)
  add = parser.add_argument
  add('runs', nargs='*', metavar='RUN', help='workdir, or a folder of workdirs')
  add(
    '--output',
    default='comparison.html',
    metavar='FILE',
    help='comparison page (default: %(default)s)',
  )
  return parser


def command() -> None:
  """Runs as a program: python -m anp_jax.tools.compare, anp-compare."""
  interrupts.listen()
  interrupts.exit(main(sys.argv))


if __name__ == '__main__':
  command()
