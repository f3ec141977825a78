"""Every key that the code reads is a key that the tables have."""

import ast

import pytest

from anp_jax import config as config_lib
from tests import launching

_CONFIG_NAMES = ('config', '_config', 'run_config', '_run_config')
# Attributes of a config and its groups that are no keys.
_METHODS = ('get', 'items', 'keys', 'values', 'to_dict', 'to_json')


def _chain(node):
  """The names of a.b.c, outermost first; None if it does not begin with a name."""
  names = []
  while isinstance(node, ast.Attribute):
    names.append(node.attr)
    node = node.value
  if isinstance(node, ast.Name):
    return [node.id, *reversed(names)]
  return None


def _key_path(chain, groups):
  """The names after the config, where a chain leads to one; else None.

  Args:
    chain: from `_chain`.
    groups: {variable: names after the config} of the function's short names.
  """
  if chain[0] in groups:
    return [*groups[chain[0]], *chain[1:]]
  for place, name in enumerate(chain):
    if name in _CONFIG_NAMES:
      return chain[place + 1 :]
  return None


def _functions(tree):
  """The functions of a file, whose short names are their own; else the file."""
  return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)] or [tree]


def _paths(text):
  """(line, names after the config) of each access in a file's text."""
  for function in _functions(ast.parse(text)):
    nodes = list(ast.walk(function))
    groups = {}
    for node in nodes:
      is_short = isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute)
      if is_short and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        chain = _chain(node.value)
        path = _key_path(chain, {}) if chain else None
        if path and '.'.join(path) in _GROUPS:
          groups[node.targets[0].id] = path
    outermost = {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
    for node in nodes:
      if isinstance(node, ast.Attribute) and id(node) not in outermost:
        chain = _chain(node)
        path = _key_path(chain, groups) if chain else None
        if path:
          yield node.lineno, path


_KEYS = frozenset(config_lib.known_keys())
_GROUPS = frozenset(
  '.'.join(parts[:count])
  for parts in (k.split('.') for k in _KEYS)
  for count in range(1, len(parts))
)


def _is_known(path):
  """Whether names lead to a key, a group, or beyond a key to its value's own."""
  names = []
  for name in path:
    if name in _METHODS:
      return True
    names.append(name)
    text = '.'.join(names)
    if text in _KEYS:
      return True
    if text not in _GROUPS:
      return False
  return True


def test_every_key_that_the_code_reads_is_in_a_table():
  wrong, count = [], 0
  for path in sorted((launching.ROOT / 'anp_jax').rglob('*.py')):
    for line, names in _paths(path.read_text()):
      if names[0] in _ROOTS:
        count += 1
        if not _is_known(names):
          wrong.append(f'{path.relative_to(launching.ROOT)}:{line}: config.{".".join(names)}')
  assert not wrong
  assert count > 300


# Objects that are called config and are none have other attributes.
_ROOTS = frozenset(key.partition('.')[0] for key in _KEYS)


@pytest.mark.parametrize(
  'text, want',
  [
    ('config.optimizer.momentum', True),
    ('self._config.optimizer.momentun', False),
    ('job.config.strategy.groups', True),
    ('def f(config):\n  s = config.strategy\n  return s.servrs', False),
    ('def f(config):\n  s = config.strategy\n  return s.simulate.workers', True),
    ("config.model.get('norm_group', 0)", True),
    ('config.batch_size.real', True),
    ('config.batchsize', None),
  ],
)
def test_the_check_sees_a_key_that_there_is_not(text, want):
  results = [_is_known(names) for _, names in _paths(text) if names[0] in _ROOTS]
  assert (all(results) if results else None) is want
