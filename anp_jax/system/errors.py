"""What an error says, in one line."""


def first_line(error: BaseException) -> str:
  """The first line of an error's text; its type's name if it says nothing."""
  lines = str(error).strip().splitlines()
  return lines[0] if lines else type(error).__name__
