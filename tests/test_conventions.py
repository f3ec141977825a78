"""The rules of docs/architecture.md: layers, words and sizes."""

import ast
import functools
import pathlib

import pytest

from anp_jax.config import strategy as strategy_lib
from scripts import code_metrics

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# From the bottom up: each imports only from those before it.
_LAYERS = (
  'config',
  'costs',
  'system',
  'commands',
  'models',
  'cluster',
  'data',
  'parallel',
  'training',
  'checkpoint',
  'experiment',
  'reporting',
  'recorder',
  'runtimes',
  'predict',
  'run',
  'ensemble',
  'train',
  'export',
  'tools',
  '__main__',
)
_MOST_LINES = {'anp_jax': 400, 'scripts': 430, 'tests': 500}


def _files(folder):
  return [path.relative_to(_ROOT) for path in sorted((_ROOT / folder).rglob('*.py'))]


@functools.cache
def _nodes(path):
  """All nodes of a file, the module first."""
  return tuple(ast.walk(ast.parse((_ROOT / path).read_text())))


@pytest.fixture(scope='module', autouse=True)
def lines_and_breaches():
  """Lines of code and breaches by path; each file is parsed once for both."""
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(_ROOT)
    paths = [str(path) for folder in _MOST_LINES for path in _files(folder)]
    yield {p: (code_metrics.code_lines(p), list(code_metrics.breaches(p))) for p in paths}
  _nodes.cache_clear()  # a million objects, for each later collection


def _imports(path):
  """The modules of anp_jax that a file imports, anywhere in it."""
  for node in _nodes(path):
    if isinstance(node, ast.ImportFrom) and node.module == 'anp_jax':
      yield from (f'anp_jax.{alias.name}' for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module.startswith('anp_jax.'):
      yield node.module


def test_every_folder_imports_only_from_those_below_it():
  wrong = []
  for path in _files('anp_jax'):
    layer = path.parts[1].removesuffix('.py')
    if layer == '__init__':
      continue
    below = _LAYERS[: _LAYERS.index(layer) + 1]
    wrong += [f'{path}: {name}' for name in _imports(path) if name.split('.')[1] not in below]
  assert not wrong


def test_onednn_has_one_door():
  """Other folders import `anp_jax.system.onednn`, and no module in it."""
  door = pathlib.Path('anp_jax/system/onednn')
  wrong = [
    f'{path}: {name}'
    for path in _files('anp_jax')
    for name in _imports(path)
    if path.parent != door and name.startswith('anp_jax.system.onednn')
  ]
  assert not wrong


def test_no_two_modules_import_each_other():
  """In no circle of any length: imports within functions count, too."""
  graph = {}
  for path in _files('anp_jax'):
    module = '.'.join(path.with_suffix('').parts).removesuffix('.__init__')
    names = set()
    for node in _nodes(path):
      if isinstance(node, ast.ImportFrom) and node.module.startswith('anp_jax'):
        names |= {f'{node.module}.{alias.name}' for alias in node.names}
    graph[module] = names
  state = {}

  def visit(module, trail):
    if state.get(module) == 'done':
      return
    assert module not in trail, ' -> '.join((*trail, module))
    for name in graph[module] & graph.keys():
      visit(name, (*trail, module))
    state[module] = 'done'

  for module in graph:
    visit(module, ())


def test_only_a_strategy_asks_for_its_own_name():
  """Everything else asks the strategy; a name is compared nowhere."""
  names = set(strategy_lib.BUILT_IN)
  compared = []
  for path in _files('anp_jax'):
    for node in _nodes(path):
      if isinstance(node, ast.Compare):
        operands = (n for side in (node.left, *node.comparators) for n in ast.walk(side))
        texts = {n.value for n in operands if isinstance(n, ast.Constant)}
        if {text for text in texts if isinstance(text, str)} & names:
          compared.append(f'{path}:{node.lineno}')
  assert not compared


def _public_functions(body):
  """The public functions in a list of statements, and those of its public classes."""
  for node in body:
    if not getattr(node, 'name', '_').startswith('_'):
      if isinstance(node, ast.FunctionDef):
        yield node
      elif isinstance(node, ast.ClassDef):
        yield from _public_functions(node.body)


def test_public_functions_are_fully_annotated():
  missing = []
  for path in _files('anp_jax'):
    for function in _public_functions(_nodes(path)[0].body):
      arguments = function.args
      every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
      every += [a for a in (arguments.vararg, arguments.kwarg) if a]
      names = [a.arg for a in every if a.annotation is None and a.arg not in ('self', 'cls')]
      names += ['the result'] * (function.returns is None)
      missing += [f'{path}: {function.name}: {name}' for name in names]
  assert not missing


def test_no_part_is_larger_than_its_budget(monkeypatch, lines_and_breaches):
  monkeypatch.chdir(_ROOT)
  monkeypatch.setattr(code_metrics, 'code_lines', lambda path: lines_and_breaches[path][0])
  sizes = code_metrics.code_by_part()
  assert sizes.keys() == code_metrics.BUDGET.keys()
  assert {part: n for part, n in sizes.items() if n > code_metrics.BUDGET[part]} == {}


@pytest.mark.parametrize('folder', ['anp_jax', 'scripts', 'tests'])
def test_words_arguments_attributes_and_lengths(folder, lines_and_breaches):
  assert not [place for path in _files(folder) for place in lines_and_breaches[str(path)][1]]


@pytest.mark.parametrize('folder, most', _MOST_LINES.items())
def test_no_file_is_longer_than_a_reader_bears(folder, most):
  lengths = {str(path): len((_ROOT / path).read_text().splitlines()) for path in _files(folder)}
  assert {path: n for path, n in lengths.items() if n > most} == {}


def test_the_rules_see_what_they_forbid(tmp_path):
  path = tmp_path / 'bad.py'
  path.write_text(
    'def f(a, b, c, d, e, g, h):\n'
    '  """See g."""\n'
    '  """\n    a: o' + 'f the run.\n  """\n'
    '  found = 1  # comes a' + 'new\n' + '  a = b\n' * 57
  )
  texts = [line.partition(': ')[2] for line in code_metrics.breaches(str(path))]
  assert sorted(texts) == [
    "docstring begins 'See g.'",
    'f: 61 lines',
    'f: 7 arguments',
    'phrase ' + repr('    a: o' + 'f'),
    'phrase ' + repr('a' + 'new'),
    "variable 'found' is no noun",
  ]


@pytest.mark.parametrize(
  'kind, body, count',
  [
    ('', 'def __init__(self):\n    self.a, self._b = 1, 2\n    self.c: int = 3', 3),
    ('', 'def g(self, x):\n    self.a = self.a + 1\n    x.b = self.c', 1),
    ('NamedTuple', 'a: int = 0\n  b: str', 2),
    ('nn.Module', 'a: int = 0\n  b: str', 0),  # a network's hyper-parameters
    ('Base', 'a: int\n  b = 3', 0),
  ],
)
def test_what_counts_as_an_attribute(kind, body, count):
  (node,) = ast.parse(f'class C({kind}):\n  {body}').body
  assert len(code_metrics.attributes(node)) == count


def test_no_class_has_more_than_12_attributes(tmp_path):
  path = tmp_path / 'wide.py'
  for count, places in ((12, []), (13, [f'{path}:2: C: 13 attributes'])):
    fields = ''.join(f'  a{i}: int\n' for i in range(count))
    path.write_text(f'@dataclasses.dataclass\nclass C:\n{fields}')
    assert list(code_metrics.breaches(str(path))) == places
