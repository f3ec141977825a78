"""Sets the papers' published figures next to ours.

  python -m anp_jax.tools.study papers all --workdir=runs/papers

NAME is anp2017, anp553, uneven2017, invariant2016, ring2015, others or all. Each paper
is a TOML file of the folder of this command: published figures, the commands
that measure or predict ours, and the numbers of their results. The command
writes a page to the workdir, with redrawn figures; --page=FILE writes it
elsewhere. A result is kept in the workdir and not measured again: the same
command goes on where it was stopped. --predict_only measures nothing, and
shows what the workdir or the TOML file has recorded.

Status 0: all well; 1: a measurement failed; 2: bad input.
"""

import json
import os
import shlex
import sys

from anp_jax.config import argument_parser, errors, exits, outputs
from anp_jax.tools.study.papers import published

_ALL = 'all'
_PAGE = 'papers.md'


@exits.with_status('interrupted; run the same command to resume')
def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  flags = _flags(arguments)
  # JAX and matplotlib, once the flags are right.
  from anp_jax.tools.study.papers import lab as lab_lib, papers_page, results

  lab = lab_lib.Lab(flags.workdir, flags.predict_only)
  sections = []
  for name in published.PAPERS if flags.name == _ALL else [flags.name]:
    sections.append(results.section(name, lab))
    print(f'\n{papers_page.plain(sections[-1])}', flush=True)
  command = shlex.join(['python', '-m', 'anp_jax.tools.study', 'papers', *arguments])
  title = 'The papers and this code' if flags.name == _ALL else flags.name
  papers_page.write(flags.page, title, command, sections)
  for line in lab.failures:
    print(f'error: {line}', file=sys.stderr)
  print(f'\npage: {flags.page}')
  ratios = {s.name: {r.what: round(r.ratio, 4) for r in s.rows if r.ratio} for s in sections}
  print(json.dumps(ratios))
  return 1 if lab.failures else 0


def _flags(arguments):
  parser = argument_parser.Parser(prog='python -m anp_jax.tools.study papers', description=__doc__)
  parser.add_argument('name', help='paper, or all')
  parser.add_argument('--workdir', default='runs/papers', help='study folder (%(default)s)')
  parser.add_argument('--page', metavar='FILE', help=f'page (default: {_PAGE} in the workdir)')
  parser.add_argument('--predict_only', action='store_true', help='predictions only')
  flags = parser.parse(arguments)
  errors.check_choice(f'papers {flags.name!r}', flags.name, (*published.PAPERS, _ALL))
  outputs.check_folder('--workdir', flags.workdir)
  flags.page = flags.page or os.path.join(flags.workdir, _PAGE)
  os.makedirs(flags.workdir, exist_ok=True)
  outputs.check_file('--page', flags.page, ('.md',))
  return flags
