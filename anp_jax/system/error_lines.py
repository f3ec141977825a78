"""Errors in one line."""


def first_line(error: BaseException) -> str:
  """Returns the first line of an error's text; its type's name if the text is empty."""
  lines = str(error).strip().splitlines()
  return lines[0] if lines else type(error).__name__


def typed_line(error: BaseException) -> str:
  """Returns the type of an error and the first line of its text, if it has one."""
  name, line = type(error).__name__, first_line(error)
  return name if line == name else f'{name}: {line}'
