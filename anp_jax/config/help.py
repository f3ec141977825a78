"""What --help=GROUP prints: a group's keys, their defaults and comments.

All of it is read off the source of `config.base`, where each key has its
default, and the comment that says what it is.
"""

import ast
import inspect
import io
import textwrap
import tokenize

from anp_jax import config as config_lib

_WIDTH = 80
_ALL, _TOP = 'all', 'config'
_OVERVIEW = """\
A run is described by a recipe, a file of configs/, and by the keys it sets. Any
key can be set on the command line too:

  --config.KEY=VALUE       as in --config.optimizer.learning_rate=0.1
  --config=FILE:VARIANT    a variant of the recipe, as in
                           --config=configs/resnet_anp.py:demo; the lines at the
                           top of each file in configs/ list its variants
  --help=GROUP             the keys of a group, with their defaults
  --help=KEY               one of them; all: every key

"""


def text(name: str) -> str:
  """What --help=NAME prints.

  Args:
    name: a group, a key, 'config' (the keys of no group) or 'all'; '': how keys
      are set, and which groups there are.

  Raises:
    ConfigError: for another name, with the nearest.
  """
  keys = list(_comments())
  groups = list(dict.fromkeys(k.split('.')[0] for k in keys if '.' in k))
  if not name:
    return _OVERVIEW + textwrap.fill(
      f'groups: {", ".join([_TOP, *groups])}',
      _WIDTH, subsequent_indent=' ' * len('groups: '),
    )  # fmt: skip
  name = name.removeprefix(f'{_TOP}.')
  if name == _ALL:
    chosen = keys
  elif name == _TOP:
    chosen = [k for k in keys if '.' not in k]
  else:
    chosen = [k for k in keys if k == name or k.startswith(f'{name}.')]
  if not chosen:
    known = [_ALL, _TOP, *groups, *keys]
    raise config_lib.ConfigError(
      f'--help={name}: expected a group ({", ".join([_TOP, *groups])}), a key '
      f'or all{config_lib.nearest(name, known)}'
    )
  return '\n'.join(_entries(chosen)).lstrip('\n')


def _entries(chosen):
  """Lines for each key, with the notes that stand above it."""
  defaults, comments = config_lib.flat(config_lib.base()), _comments()
  for key in chosen:
    above, comment = comments[key]
    if above:
      yield ''
      yield from textwrap.wrap(
        above, _WIDTH, initial_indent='# ', subsequent_indent='# '
      )
    line = f'config.{key} = {defaults[key]!r}'
    indent = ' ' * 6
    if comment and len(line) + 2 + len(comment) <= _WIDTH:
      yield f'{line}  {comment}'
      continue
    yield line
    yield from textwrap.wrap(
      comment, _WIDTH, initial_indent=indent, subsequent_indent=indent
    )


def _comments() -> dict[str, tuple[str, str]]:
  """For each key, the comment lines above it and those beside its value.

  The order is that of the source: a line above may be of several keys.
  """
  source = textwrap.dedent(inspect.getsource(config_lib.base))
  beside, alone = {}, {}
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type == tokenize.COMMENT:
      row, column = token.start
      words = token.string.lstrip('# ')
      whole_line = not token.line[:column].strip()
      (alone if whole_line else beside)[row] = words
  groups, comments = {'c': ''}, {}
  for statement in ast.parse(source).body[0].body:
    if not isinstance(statement, ast.Assign):
      continue
    key = _key(statement.targets[0], groups)
    if len(statement.targets) > 1:  # a group, and the name for it
      groups[statement.targets[1].id] = f'{key}.'
    if not key or len(statement.targets) > 1:
      continue
    rows = range(statement.lineno, statement.end_lineno + 1)
    first = statement.lineno
    while first - 1 in alone:
      first -= 1
    comments[key] = (
      ' '.join(alone[row] for row in range(first, statement.lineno)),
      ' '.join(beside[row] for row in rows if row in beside),
    )
  return comments


def _key(target, groups):
  """The dotted key that `d.mixup` or `i['from']` names; '' for a variable."""
  if isinstance(target, ast.Attribute):
    return groups[target.value.id] + target.attr
  if isinstance(target, ast.Subscript):
    return groups[target.value.id] + target.slice.value
  return ''
