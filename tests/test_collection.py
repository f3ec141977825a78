"""Files of tests can be imported where what they compare with is absent."""

import ast
import functools
import pathlib

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PEERS = {'torch', 'transformers', 'timm', 'keras'}


@functools.cache
def _imports(path):
  """The modules that a file imports when it is imported itself, up to a skip."""
  names = set()
  for node in ast.parse(path.read_text()).body:
    if 'pytest.importorskip' in ast.unparse(node) and not isinstance(node, ast.FunctionDef):
      break
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
      names |= {node.module, *(f'{node.module}.{alias.name}' for alias in node.names)}
  return names


def _peers(path, visited):
  """The peers that are imported with a file, by way of other files too."""
  peers = set()
  for name in _imports(path):
    peers |= {name.partition('.')[0]} & _PEERS
    other = _ROOT / f'{name.replace(".", "/")}.py'
    if name.startswith(('tests.', 'scripts.')) and other.is_file() and other not in visited:
      visited.add(other)
      peers |= _peers(other, visited)
  return peers


def test_tests_are_imported_without_peers():
  files = sorted((_ROOT / 'tests').rglob('test_*.py'))
  assert not {str(path) for path in files if _peers(path, set())}
  assert _peers(_ROOT / 'tests' / 'published.py', set()) == {'torch'}
