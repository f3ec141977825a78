"""The page of several runs, one HTML file: curves, differences of configs, results."""

import os

from anp_jax import config as config_lib
from anp_jax.reporting import report_kit
from anp_jax.system import drawing, files, markdown
from anp_jax.tools.compare import comparison_curves, comparison_tables, runs as runs_lib

_WIDEST = 100  # columns of a terminal's table, beyond which names are numbers
_LETTERS = 40  # of a cell there
_CAUTION = (
  'the runs name different classes, or were scored on different images: '
  'their scores do not say which is better'
)
_APART = '† the runs were trained on different images: the rates do not say which run is faster'
_SWATCH = 2  # pixels of a dash whose length is 1


def write(paths: list[str], output: str) -> str:
  """Writes the page that compares runs.

  Args:
    paths: paths of workdirs, or of folders that hold workdirs.
    output: path of the HTML file.

  Returns:
    Differences and results, as plain text for the terminal.

  Raises:
    ConfigError: if a path leads to no run.
    OSError: if the file cannot be written.
  """
  runs = runs_lib.find(paths)
  differences, results = comparison_tables.differences(runs), comparison_tables.results(runs)
  caution = '' if comparison_tables.were_scored_alike(runs) else _CAUTION
  notes = {
    'caution': caution,
    'has_best': any(row.best for row in results),
    'footnote': _APART * any(row.label.endswith(comparison_tables.APART) for row in results),
  }
  files.write_atomic(output, _page(runs, differences, results, notes))
  names = [run.name for run in runs]
  blocks = []
  if any(_width(names, rows) > _WIDEST for rows in (differences, results)):
    blocks.append('\n'.join(f'{i}  {name}' for i, name in enumerate(names, 1)))
    names = [str(i) for i in range(1, len(names) + 1)]
  if caution:
    blocks.append(f'caution  {caution}')
  blocks += [
    _plain(names, differences) or 'the configs do not differ',
    _plain(names, results) or 'nothing was recorded',
  ]
  if notes['has_best']:
    blocks.append('* the best of the runs')
  if notes['footnote']:
    blocks.append(_APART)
  return '\n\n'.join(blocks)


def _page(runs, differences, results, notes):
  png = comparison_curves.draw(runs)
  count = f'{len(runs)} run' + 's' * (len(runs) > 1)
  looks = [comparison_curves.look(index) for index in range(len(runs))]
  sections = {
    'Results': results or 'Nothing was recorded.',
    'Curves': report_kit.data_uri(png, 'png') if png else '',
    'Differences': differences or 'The configs do not differ.',
    'Runs': [
      {
        'name': config_lib.printable(run.name),
        'path': os.path.abspath(run.path),
        'color': look.color,
        'glyph': look.glyph,
        'dashes': ' '.join(f'{_SWATCH * length:g}' for length in look.dashes),
      }
      for run, look in zip(runs, looks)
    ],
  }
  return report_kit.html(os.path.dirname(__file__), f'Comparison of {count}', sections, **notes)


def _plain(names, rows):
  """A table for the terminal; '' if it has no rows."""
  if not rows:
    return ''
  head = ['', *(f'{drawing.shortened(name, _LETTERS)} ' for name in names)]
  body = [
    [
      row.label,
      *(
        drawing.shortened(cell, _LETTERS) + (' ', '*')[i in row.best]
        for i, cell in enumerate(row.cells)
      ),
    ]
    for row in rows
  ]
  return markdown.plain([head, *body], 'lr')


def _width(names, rows):
  return len(_plain(names, rows).partition('\n')[0])
