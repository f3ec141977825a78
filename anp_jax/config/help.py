"""The text of --help=GROUP: a group's keys, defaults and allowed values."""

import textwrap

from anp_jax.config import errors, key_table, resolve, strategy as strategy_lib

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
  """Returns what --help=NAME prints.

  Args:
    name: group, key, 'config' (the keys without a group) or 'all'; '': how to set
      keys, and the groups.

  Raises:
    ConfigError: for another name, with the nearest.
  """
  sections = _sections()
  keys = list(dict.fromkeys(k for _, keys in sections for k in keys))
  groups = list(dict.fromkeys(k.split('.')[0] for k in keys if '.' in k))
  if not name:
    return _OVERVIEW + textwrap.fill(
      f'groups: {", ".join([_TOP, *groups])}', _WIDTH, subsequent_indent=' ' * len('groups: ')
    )
  name = name.removeprefix(f'{_TOP}.')
  if name == _ALL:
    chosen = set(keys)
  elif name == _TOP:
    chosen = {k for k in keys if '.' not in k}
  else:
    chosen = {k for k in keys if k == name or k.startswith(f'{name}.')}
  if not chosen:
    raise errors.ConfigError(
      f'--help={name}: expected a group ({", ".join([_TOP, *groups])}), a key '
      f'or all{errors.nearest(name, [_ALL, _TOP, *groups, *keys])}'
    )
  lines: list[str] = []
  for title, section in sections:
    members = {k: d for k, d in section.items() if k in chosen}
    lines += _wrapped(title, '# ') if title and members else []
    for key, declared in members.items():
      lines += _entry(key, declared)
  return '\n'.join(lines)


def _sections():
  """(title, keys by dotted name): the common table, then each strategy's."""
  sections = [('', key_table.KEYS)]
  for name in strategy_lib.BUILT_IN:
    purpose = type(strategy_lib.by_name(name)).__doc__.splitlines()[0]
    sections.append((f'strategy.name={name}: {purpose}', resolve.strategy_keys(name)))
  return sections


def _entry(key, declared):
  """The lines of one key."""
  notes = [declared.expected] if declared.expected else []
  if declared.only_if:
    notes.append(f'only with {declared.condition}')
  comment = declared.help + (f' ({"; ".join(notes)})' if notes else '')
  line = f'config.{key} = {declared.default!r}'
  if len(line) + 2 + len(comment) <= _WIDTH:
    return [f'{line}  {comment}']
  return [line, *_wrapped(comment, ' ' * 6)]


def _wrapped(words, indent):
  return textwrap.wrap(words, _WIDTH, initial_indent=indent, subsequent_indent=indent)
