"""Texts that a data set brings, such as names of files, for people to read."""

import unicodedata

# Control characters, ends of lines and paragraphs.
_OBEYED = ('Cc', 'Zl', 'Zp')
# They let a terminal show text from right to left.
_DIRECTIONS = set('\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069')
_FORMULA = ('=', '+', '-', '@', '\t', '\r')


def printable(text: str) -> str:
  """The text; what a terminal would obey stands there as an escape."""
  if text.isprintable():
    return text
  return ''.join(
    c.encode('unicode_escape').decode()
    if unicodedata.category(c) in _OBEYED or c in _DIRECTIONS
    else c
    for c in text
  )


def csv_cell(value):
  """A value of a CSV file; a text that a spreadsheet would run is quoted.

  Args:
    value: of any type; a text that is a number stays as it is.

  Returns:
    The value; or the text after an apostrophe, which spreadsheets take for the
    mark of a text.
  """
  if not isinstance(value, str) or not value.startswith(_FORMULA):
    return value
  try:
    float(value)
  except ValueError:
    return f"'{value}"
  return value
