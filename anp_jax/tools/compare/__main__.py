"""Compares runs: curves, what differs in their configs, what they reached.

python -m anp_jax.tools.compare runs/first runs/second --output=comparison.html

RUN is a workdir; of a folder that holds workdirs, all of them are compared. The
page is one file that opens anywhere. Runs may be unfinished, and may go on.
"""

if __name__ == '__main__':
  from anp_jax import commands

  commands.compare()


from anp_jax import config as config_lib
from anp_jax.config import argument_parser, exits, outputs


@exits.with_status()
def main(argv: list[str]) -> int:
  """Returns the process's exit status: 0, 2 (bad input), 130 (Ctrl-C)."""
  flags = _parse(argv[1:])
  from anp_jax.tools.compare import comparison_page

  print(comparison_page.write(flags.runs, flags.output))
  print(f'\ncomparison: {flags.output}', flush=True)
  return 0


def _parse(arguments):
  parser = argument_parser.Parser(prog='python -m anp_jax.tools.compare', description=__doc__)
  add = parser.add_argument
  add('runs', nargs='*', metavar='RUN', help='a workdir, or a folder of them')
  add('--output', default='comparison.html', metavar='FILE', help='the page (default: %(default)s)')
  flags = parser.parse(arguments)
  if not flags.runs:
    raise config_lib.ConfigError('no run is given: expected workdirs')
  outputs.check_file('--output', flags.output, ('.html', '.htm'))
  return flags
