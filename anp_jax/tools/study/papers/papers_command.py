"""Sets the papers' published figures next to ours.

  python -m anp_jax.tools.study papers all --workdir=runs/papers

NAME is anp2017, uneven2017, invariant2016, ring2015, others or all: for each
paper, its experiment in the form in which it was published, measured as far as
this machine allows, predicted by the emulator and the planner, or "not run,
because ...". It writes a page to the workdir, with redrawn figures; --page=FILE
writes it elsewhere. What has been measured is kept in the workdir and not
measured again: the same command goes on where it was stopped. --predict_only
leaves out what is not in the workdir and computes for more than some seconds.

Status 0: all well; 1: a measurement failed; 2: bad input.
"""

import json
import os
import shlex
import sys

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, exits, outputs
from anp_jax.tools.study.papers import published_figures

_ALL = 'all'
_PAGE = 'papers.md'


@exits.with_status('interrupted; run the same command to resume')
def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  flags = _flags(arguments)
  # JAX and matplotlib, once the flags are right.
  from anp_jax.tools.study.papers import lab as lab_lib, papers_page, sections

  lab = lab_lib.Lab(flags.workdir, flags.predict_only)
  facts = published_figures.read()
  names = list(facts) if flags.name == _ALL else [flags.name]
  written = []
  for name in names:
    section = sections.BY_NAME[name](lab, facts[name])
    written.append((section, lab.take_commands()))
    print(f'\n{papers_page.plain(section)}', flush=True)
  command = shlex.join(['python', '-m', 'anp_jax.tools.study', 'papers', *arguments])
  title = 'The papers and this code' if flags.name == _ALL else flags.name
  papers_page.write(flags.page, title, command, written)
  for line in lab.failures:
    print(f'error: {line}', file=sys.stderr)
  print(f'\npage: {flags.page}')
  print(
    json.dumps(
      {
        name: {r.what: round(r.ratio, 4) for r in section.rows if r.ratio}
        for name, (section, _) in zip(names, written)
      }
    )
  )
  return 1 if lab.failures else 0


def _flags(arguments):
  parser = argument_parser.Parser(prog='python -m anp_jax.tools.study papers', description=__doc__)
  parser.add_argument('name', help='a paper, or all')
  parser.add_argument('--workdir', default='runs/papers', help='of the study (%(default)s)')
  parser.add_argument('--page', metavar='FILE', help=f'default: {_PAGE} in the workdir')
  parser.add_argument(
    '--predict_only', action='store_true', help='measure nothing that takes more than some seconds'
  )
  flags = parser.parse(arguments)
  names = (*published_figures.read(), _ALL)
  if flags.name not in names:
    raise config_lib.ConfigError(
      f'papers {flags.name!r}: expected one of {", ".join(names)}'
      f'{config_lib.nearest(flags.name, names)}'
    )
  outputs.check_folder('--workdir', flags.workdir)
  flags.page = flags.page or os.path.join(flags.workdir, _PAGE)
  os.makedirs(flags.workdir, exist_ok=True)
  outputs.check_file('--page', flags.page, ('.md',))
  return flags
