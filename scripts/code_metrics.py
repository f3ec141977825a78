"""Finds what makes a file hard to enter, and counts lines of code.

  python -m scripts.code_metrics --rules anp_jax scripts
  python -m scripts.code_metrics --code

The first prints the places that break the rules of docs/architecture.md (What the
tests hold), and ends with status 1 if there are any; the second prints how large
each part of the project is: lines of code, without docstrings, comments and blanks,
and for docs all lines, and the most that it may have, which a test holds.
"""

import ast
from collections.abc import Iterator
import functools
import glob
import os
import re
import sys

MAX_ARGUMENTS = 6
MAX_LINES = 60  # of a function's body, without its docstring
MAX_ATTRIBUTES = 12  # of a class
# Most lines of code of each part (of docs: all lines). Only a commit that says
# why may raise one.
BUDGET = {
  'anp_jax': 790,
  'anp_jax/checkpoint': 2_420,
  'anp_jax/cluster': 3_045,
  'anp_jax/config': 2_250,
  'anp_jax/costs': 445,
  'anp_jax/data': 5_930,
  'anp_jax/ensemble': 540,
  'anp_jax/models': 1_800,
  'anp_jax/parallel': 1_545,
  'anp_jax/predict': 590,
  'anp_jax/reporting': 2_215,
  'anp_jax/runtimes': 5_500,
  'anp_jax/system': 2_265,
  'anp_jax/tools': 5_875,
  'anp_jax/training': 1_145,
  'core': 30_450,
  'scripts': 2_815,
  'tests': 39_445,
  'docs': 3_000,
}
# A variable is a noun of the domain: no bare participle, no pronoun.
_NOT_NOUNS = frozenset(
  'asked begun both found given have heard held kept known lacking like made '
  'mine one others own said seen shown taken theirs these this those told '
  'wanted whole whose'.split()
)
_PHRASES = re.compile(
  r'\banew\b|\bbesides?\b|\bof which\b|\bwho asks?\b|\b[Aa]s of\b|'
  r'\bof those that\b|^ +\*{0,2}\w+: of\b'  # an argument's text stands alone
)
_DOCSTRING = re.compile(r'(Of|See|As|Makes it)\b')
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(path: str) -> int:
  """Returns the lines of a Python file that are not docstring, comment, blank."""
  text = _read(path)
  docstrings = set()
  for node in _nodes(text):
    is_scope = isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Module))
    if is_scope and ast.get_docstring(node) is not None:
      docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
  return sum(
    bool(line.strip()) and not line.strip().startswith('#')
    for number, line in enumerate(text.splitlines(), 1)
    if number not in docstrings
  )


def arguments(function: ast.FunctionDef) -> int:
  """The arguments of a function, without self and cls."""
  names = function.args.posonlyargs + function.args.args
  bound = bool(names) and names[0].arg in ('self', 'cls')
  return len(names) + len(function.args.kwonlyargs) - bound


def body_lines(function: ast.FunctionDef) -> int:
  """The lines of a function's body, without its docstring."""
  body = function.body
  if len(body) > 1 and ast.get_docstring(function) is not None:
    body = body[1:]
  return body[-1].end_lineno - body[0].lineno + 1


def attributes(node: ast.ClassDef) -> set[str]:
  """The attributes of a class's instances: assigned to self, and fields of a record.

  A Flax module has none here: its fields are the hyper-parameters of a network, as
  many as the paper has, and Flax itself keeps the state.
  """
  if any(ast.unparse(base).endswith('nn.Module') for base in node.bases):
    return set()
  targets = (name for name in ast.walk(node) if isinstance(name, ast.Attribute))
  names = {
    target.attr
    for target in targets
    if isinstance(target.ctx, ast.Store) and ast.unparse(target.value) == 'self'
  }
  marks = [ast.unparse(mark) for mark in (*node.bases, *node.decorator_list)]
  if any('NamedTuple' in mark or 'dataclass' in mark for mark in marks):
    names |= {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}
  return names


def breaches(path: str) -> Iterator[str]:
  """Each place of a Python file that breaks a rule, as 'path:line: what'."""
  text = _read(path)
  for node in _nodes(text):
    if isinstance(node, _FUNCTIONS):
      if arguments(node) > MAX_ARGUMENTS:
        yield f'{path}:{node.lineno}: {node.name}: {arguments(node)} arguments'
      if body_lines(node) > MAX_LINES:
        yield f'{path}:{node.lineno}: {node.name}: {body_lines(node)} lines'
    if isinstance(node, ast.ClassDef) and len(attributes(node)) > MAX_ATTRIBUTES:
      yield f'{path}:{node.lineno}: {node.name}: {len(attributes(node))} attributes'
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Module)):
      docstring = ast.get_docstring(node) or ''
      if _DOCSTRING.match(docstring):
        line = getattr(node, 'lineno', 1)
        yield f'{path}:{line}: docstring begins {docstring[:20]!r}'
    name = _assigned(node)
    if name in _NOT_NOUNS:
      yield f'{path}:{node.lineno}: variable {name!r} is no noun'
  for number, line in enumerate(text.splitlines(), 1):
    phrase = _PHRASES.search(line)
    if phrase:
      yield f'{path}:{number}: phrase {phrase[0]!r}'


def python_files(path: str) -> list[str]:
  """The Python files of a folder and those below it, or the file itself."""
  if os.path.isfile(path):
    return [path]
  return sorted(glob.glob(f'{path}/**/*.py', recursive=True))


def code_by_part() -> dict[str, int]:
  """Returns the lines of code of each part of the project, in the working folder.

  Returns:
    {folder: lines}, where `anp_jax` stands for its files that are in no folder;
    'core' is all of `anp_jax` without `tools`, 'docs' all lines of Markdown.
  """
  folders = sorted(
    path for path in glob.glob('anp_jax/*') if os.path.isdir(path) and '__' not in path
  )
  parts = {
    'anp_jax': sum(map(code_lines, glob.glob('anp_jax/*.py'))),
    **{path: _code_of_folder(path) for path in folders},
  }
  core = sum(parts.values()) - parts['anp_jax/tools']
  docs = sum(len(_read(path).splitlines()) for path in ['README.md', *glob.glob('docs/*.md')])
  code = {path: _code_of_folder(path) for path in ('scripts', 'tests')}
  return {**parts, 'core': core, **code, 'docs': docs}


def _code_of_folder(path):
  return sum(map(code_lines, python_files(path)))


def _assigned(node) -> str | None:
  """The name that a node gives to a variable or an argument."""
  if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
    return node.id
  return node.arg if isinstance(node, ast.arg) else None


@functools.lru_cache(maxsize=1)
def _nodes(text):
  """The nodes of a file, for a caller that asks for its lines and its breaches."""
  return list(ast.walk(ast.parse(text)))


def _read(path):
  with open(path, encoding='utf-8') as file:
    return file.read()


def main(argv: list[str]) -> int:
  """Prints the sizes, or the breaches; gives the exit status."""
  option, *paths = argv[1:] or ['']
  if option == '--code':
    print('| part | lines | budget |\n|---|---|---|')
    for part, lines in code_by_part().items():
      print(f'| {part} | {lines:,} | {BUDGET[part]:,} |')
    return 0
  if option != '--rules' or not paths:
    print(__doc__)
    return 2
  lines = [line for path in paths for file in python_files(path) for line in breaches(file)]
  print(''.join(f'{line}\n' for line in lines), end='')
  return int(bool(lines))


if __name__ == '__main__':
  sys.exit(main(sys.argv))
