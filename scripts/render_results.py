"""Writes docs/results.md from the tables of measured figures in results/*.csv.

The page has a table per file. For a question that was measured several times it
shows the newest row; the file keeps all of them, with their commands.
"""

import csv
import pathlib

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PAGE = _ROOT / 'docs' / 'results.md'
COLUMNS = 'question goal date machine versions command n median low high unit note'.split()
_HEAD = """\
# Results

This page is rendered by `scripts/render_results.py` from `results/*.csv`. The CSV files also hold
the commands, the versions and older measurements. [The log](log.md) explains the figures and tells
what failed.

A figure is a median, followed by its quartiles in brackets, unless the note says otherwise; with a
95 % interval or a deviation it is a mean. `x` is a ratio; the text after "over" names its
denominator, and a ratio of speeds above 1 means that this package is faster. "Met" and "missed"
compare the figure with the goal; without a figure, they compare the whole interval. The machines
are shared and have no GPU, unless another is named.
"""


def read(path):
  """Returns the rows of a CSV file as dictionaries, in the order of the file.

  Raises:
    ValueError: The columns of the file, or a number in it, are not as expected.
  """
  with open(path, newline='', encoding='utf-8') as file:
    reader = csv.DictReader(file)
    if reader.fieldnames != COLUMNS:
      raise ValueError(f'{path}: columns {reader.fieldnames}, expected {COLUMNS}')
    rows = list(reader)
  for line, row in enumerate(rows, 2):
    for column in ('n', 'median', 'low', 'high'):
      try:
        float(row[column] or 0)
      except ValueError:
        raise ValueError(f'{path}:{line}: {column} {row[column]!r} is not a number') from None
  return rows


def newest(rows):
  """Returns the newest row of each question, in the order of the questions."""
  chosen = {}
  for row in rows:
    if row['question'] not in chosen or row['date'] >= chosen[row['question']]['date']:
      chosen[row['question']] = row
  return list(chosen.values())


def verdict(row):
  """Returns the goal of a row and whether its figure meets it."""
  if not row['goal']:
    return ''
  sign, bound = row['goal'].split()
  values = [float(row[name]) for name in ('low', 'high') if row[name]]
  if row['median']:
    values = [float(row['median'])]
  met = all(v >= float(bound) if sign == '>=' else v <= float(bound) for v in values)
  return f'{row["goal"]}: {"met" if met else "**missed**"}'


def figure(row):
  """Returns the figure of a row with its interval and its unit."""
  low, high = row['low'], row['high']
  interval = f'{low} to {high}' if low and high else f'lowest {low}' if low else ''
  if row['median'] and interval:
    return f'{row["median"]} ({interval}) {row["unit"]}'
  return f'{row["median"] or interval} {row["unit"]}'


def render(folder):
  """Returns the page for the CSV files of a folder."""
  lines = [_HEAD]
  for path in sorted(folder.glob('*.csv')):
    lines += [
      f'## {path.stem.replace("_", " ").capitalize()}\n',
      '| question | figure | goal | n | date, machine | note |',
      '|---|---|---|---|---|---|',
    ]
    for row in newest(read(path)):
      where = f'{row["date"]}, {row["machine"]}'
      cells = [row['question'], figure(row), verdict(row), row['n'], where, row['note']]
      lines.append(f'| {" | ".join(cells)} |')
    lines.append('')
  return '\n'.join(lines)


if __name__ == '__main__':
  _PAGE.write_text(render(_ROOT / 'results'), encoding='utf-8')
