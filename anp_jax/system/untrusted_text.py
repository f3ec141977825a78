"""Texts from data sets, such as file names, made safe to print."""

from typing import Any
import unicodedata

# Control characters, ends of lines and paragraphs, and bytes that are not UTF-8, which some
# streams refuse.
_OBEYED = ('Cc', 'Cs', 'Zl', 'Zp')
# They let a terminal show text from right to left.
_DIRECTIONS = set('\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069')
_FORMULA = ('=', '+', '-', '@', '\t', '\r')


def printable(text: str) -> str:
  """Returns the text, with escapes for what a terminal would obey."""
  if text.isprintable():
    return text
  return ''.join(
    c.encode('unicode_escape').decode()
    if unicodedata.category(c) in _OBEYED or c in _DIRECTIONS
    else c
    for c in text
  )


def csv_cell(value: Any) -> Any:
  """Returns a value for a CSV file, where no spreadsheet runs a text as a formula.

  Args:
    value: value of any type; a text that is a number stays.

  Returns:
    The value, or the text after an apostrophe, by which spreadsheets mark a text.
  """
  if not isinstance(value, str) or not value.startswith(_FORMULA):
    return value
  try:
    float(value)
  except ValueError:
    return f"'{value}"
  return value
