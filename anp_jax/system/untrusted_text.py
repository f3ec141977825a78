"""Texts from data sets, such as file names, made safe for spreadsheets."""

from typing import Any

_FORMULA = ('=', '+', '-', '@', '\t', '\r')


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
