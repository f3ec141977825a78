"""Tables in Markdown and as aligned plain text."""

from collections.abc import Sequence
import re

# An underscore within a word, as in class_top1, marks nothing up.
_MARKUP = re.compile(r'[\\`*\[\]<>|]|(?<!\w)_|_(?!\w)')

_RULES = {'l': '---', 'r': '---:'}


def table(rows: Sequence[Sequence[str]], align: str = 'l') -> str:
  """Returns a Markdown table whose cells are escaped.

  Args:
    rows: rows of cells; the first row is the header.
    align: one letter per column, 'l' or 'r'; the last letter also holds for all
      further columns.
  """
  head, *body = ([escape(cell) for cell in row] for row in rows)
  rule = [_RULES[letter] for letter in _letters(align, len(head))]
  lines = (head, rule, *body)
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def plain(rows: Sequence[Sequence[str]], align: str = 'l') -> str:
  """Returns rows as aligned columns, two spaces apart, for a terminal.

  Args:
    rows: rows of one-line cells.
    align: alignment as for `table`.
  """
  widths = [max(map(len, column)) for column in zip(*rows)]
  letters = _letters(align, len(widths))
  lines = []
  for row in rows:
    cells = (
      cell.rjust(width) if letter == 'r' else cell.ljust(width)
      for cell, width, letter in zip(row, widths, letters)
    )
    lines.append('  '.join(cells).rstrip())
  return '\n'.join(lines)


def escape(text: str) -> str:
  """Returns a text on one line without Markdown markup."""
  return _MARKUP.sub(r'\\\g<0>', ' '.join(text.split()))


def _letters(align, columns):
  return align.ljust(columns, align[-1])[:columns]
