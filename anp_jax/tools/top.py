"""Shows what each process of a run does, and which one holds the others up.

python -m anp_jax.tools.top runs/first
python -m anp_jax.tools.top runs/first --once
python -m anp_jax.tools.top runs/first --stacks

It asks the coordinator of a run of several processes, with the secret in the workdir.
"""

if __name__ == '__main__':
  from anp_jax import commands

  commands.top()

import contextlib
import json
import sys
import time

import rich.console
import rich.live
import rich.table
import rich.text

from anp_jax.cluster import joining, lateness, secret
from anp_jax.config import argument_parser, errors, exits
from anp_jax.system import files

_PERIOD = 1.0  # seconds between two looks
_WITHIN = 10.0  # seconds, an answer; the processes may be restarting
_WIDTH = 500  # characters
_COLUMNS = 'process', 'step', 'does', 'cores', 'want', 'input', 'rest', 'save', 'eval', 'late ms'


@exits.with_status()
def main(argv: list[str]) -> int:
  """Returns the process's exit status: 0, 2 (bad input), 130 (Ctrl-C)."""
  parser = argument_parser.Parser(prog='python -m anp_jax.tools.top', description=__doc__)
  parser.add_argument('workdir', metavar='WORKDIR', help='workdir of the run')
  parser.add_argument('--once', action='store_true', help='print one table, and end')
  parser.add_argument(
    '--stacks', action='store_true', help='have each process print its stacks to its log'
  )
  flags = parser.parse(argv[1:])
  joining.check(flags.workdir)
  answers = _answers(flags.workdir, 'stacks' if flags.stacks else 'rows')
  if flags.stacks:
    next(answers)
    print('each process has printed the stacks of its threads to its log')
    return 0
  # A file has lines of any length.
  console = rich.console.Console(width=None if sys.stdout.isatty() else _WIDTH)
  if flags.once or not console.is_terminal:
    console.print(_view(next(answers)))
    return 0
  with rich.live.Live(console=console, auto_refresh=False) as live:
    for answer in answers:
      live.update(_view(answer), refresh=True)
      time.sleep(_PERIOD)
  return 0


def _answers(workdir, question):
  """Yields what the coordinator answers, again and again.

  Raises:
    ConfigError: if no process of the run answers any more.
  """
  key = secret.for_run(workdir, makes=False)
  while True:
    with joining.connect(workdir, key, _WITHIN, _WITHIN) as connection:
      connection.settimeout(_WITHIN)
      # It ends where the processes restart.
      with contextlib.suppress(OSError, ValueError), connection.makefile('rw') as stream:
        while True:
          stream.write(json.dumps({'ask': question}) + '\n')
          stream.flush()
          yield files.loads(stream.readline())


def _view(answer):
  """A table of the processes, with the verdict below.

  Raises:
    ConfigError: if the answer has none.
  """
  try:
    rows = [lateness.Row(*values) for values in answer['rows']]
    late = lateness.excess(rows)
    lines = [[*map(_text, _cells(row, late.get(row.name)))] for row in rows]
    below = [_text(f' {text}') for text in (*answer['losses'], answer['verdict'])]
  except (KeyError, OverflowError, TypeError, ValueError) as e:
    raise errors.ConfigError('the coordinator answered no rows of processes') from e
  table = rich.table.Table(*_COLUMNS, box=None, collapse_padding=True)
  for column in table.columns[1:2] + table.columns[3:]:
    column.justify = 'right'
  for cells in lines:
    table.add_row(*cells)
  return rich.console.Group(table, *below)


def _text(text):
  """A text of another process, in which neither the terminal nor rich obeys anything."""
  return rich.text.Text(errors.printable(text))


def _cells(row, late):
  does = row.phase if row.seconds < 1 else f'{row.phase}, {row.seconds:.0f} s'
  if row.silence > lateness.SILENT:
    does = f'silent, {row.silence:.0f} s'
  times = []
  if row.rest:
    evaluating, saving, _ = row.pauses
    times = [f'{ms:.1f}' for ms in (row.input, row.rest, saving, evaluating)]
  return (
    row.name,
    str(row.step or ''),
    does,
    f'{row.cpu:.2f}',
    f'{row.cpu + row.delay:.2f}',
    *(times or 4 * ['']),
    '' if late is None else f'{late:.1f}',
  )
