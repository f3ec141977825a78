"""What a program sends between devices, from its text.

Two texts are read: StableHLO, what JAX asks XLA for, and the HLO that XLA
compiled it to, in the order of its schedule.
"""

from collections.abc import Iterable
import dataclasses
import math
import re

from anp_jax.tools.portability import compiled_program as program_lib

KINDS = (
  'all-reduce',
  'all-gather',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
  'collective-broadcast',
  'ragged-all-to-all',
)
# What an all-to-all brings, the strategies add.
_SUMS = ('all-reduce', 'reduce-scatter', 'all-to-all')
_ASKED = re.compile('"?stablehlo\\.(' + '|'.join(k.replace('-', '_') for k in KINDS) + ')"?')
_BRANCHES = re.compile(r'"?stablehlo\.(?:case|if)"?\(')
# An operation's types end the line on which its region ends, if it has one.
_TYPES = re.compile(r' : \((tensor<.*>)\) -> \(?(tensor<.*>)\)?\s*(?:loc\(|$)')
_TENSOR = re.compile(r'tensor<((?:\d+x)*)([a-z]\w*)>')
_NUMBER = re.compile(r'(bf|f|s|si|i|u|ui|c)(\d+)')
_NAMES = {
  'bf': 'bfloat',
  'f': 'float',
  's': 'int',
  'si': 'int',
  'i': 'int',
  'u': 'uint',
  'ui': 'uint',
  'c': 'complex',
}
# In a schedule, what takes no time of the units that compute.
_IDLE = frozenset(
  (
    'parameter',
    'constant',
    'tuple',
    'get-tuple-element',
    'bitcast',
    'copy',
    'after-all',
    'partition-id',
    'replica-id',
    'opt-barrier',
    'async-start',
    'async-update',
    'async-done',
    'copy-start',
    'copy-done',
    'slice-start',
    'slice-done',
    'domain',
    'iota',
  )
)


@dataclasses.dataclass(frozen=True)
class Collective:
  """One operation between devices.

  Attributes:
    kind: of KINDS.
    elements: dtype, as NumPy names it, and elements of each array: of the whole
      array, which is an all-gather's result and a reduce-scatter's operand.
    size: bytes of all arrays.
    conditional: whether it stands in a branch, which not every run takes.
    overlapping: instructions that compute between its beginning and its end;
      None for one that is synchronous.
    products: matrix products and convolutions among them, or within.
  """

  kind: str
  elements: tuple[tuple[str, int], ...]
  size: int
  conditional: bool = False
  overlapping: int | None = None
  products: int = 0


def asked(text: str) -> list[Collective]:
  """Those that JAX's StableHLO names; what XLA will insert is not there yet."""
  collectives, kind, branch = [], None, None
  for line in text.splitlines():
    indent = len(line) - len(line.lstrip())
    if branch is None and _BRANCHES.search(line):
      branch = indent
    elif indent == branch and line.lstrip().startswith('})'):
      branch = None
    if match := _ASKED.search(line):
      kind = match[1].replace('_', '-')
    if kind and (types := _TYPES.search(line)):
      sides = [
        [
          (dtype, tuple(int(n) for n in shape.split('x') if n))
          for shape, dtype in _TENSOR.findall(side)
        ]
        for side in types.groups()
      ]
      collectives.append(_collective(kind, *sides, branch is not None))
      kind = None
  return collectives


def compiled(text: str) -> list[Collective]:
  """Those of a compiled program; one in a loop's body counts once.

  Args:
    text: of `jax.stages.Compiled.as_text`.
  """
  program = program_lib.Program(text)
  schedule = list(program.instructions.values())
  place = {i.name: n for n, i in enumerate(schedule)}
  scheduled = 'is_scheduled=true' in text.partition('\n')[0]
  collectives = []
  for i in schedule:
    kind = i.opcode.removesuffix('-start')
    if kind not in KINDS:
      continue
    caller = program.caller(i)
    wrapped = caller is not None and caller.opcode == 'async-start'
    start = caller if wrapped else i
    done = _done(program, start) if wrapped or kind != i.opcode else None
    conditional = any(c.opcode == 'conditional' for c in _around(program, i))
    operands = [a for o in i.operands for a in program.instructions[o].arrays]
    # The result of a start repeats its operands, among other things.
    results = (done or i).arrays
    overlapping, products = None, 0
    if done and scheduled:
      between = schedule[place[start.name] + 1 : place[done.name]]
      working = [b for b in between if _computes(b)]
      overlapping = len(working)
      products = sum(program.product(b) is not None for b in working)
    collectives.append(_collective(kind, operands, results, conditional, overlapping, products))
  return collectives


def totals(collectives: Iterable[Collective]) -> list[dict]:
  """Sums by kind, dtype and whether conditional, the most bytes first.

  Returns:
    Dicts of kind, dtype, conditional, operations, elements, bytes and, of the
    bytes: asynchronous, which the program does not wait for at once;
    overlapping_compute and overlapping_products, which travel while something,
    or a matrix product or convolution, is computed.
  """
  rows = {}
  for c in collectives:
    for dtype in dict.fromkeys(d for d, _ in c.elements):
      row = rows.setdefault(
        (c.kind, dtype, c.conditional),
        dict(
          kind=c.kind,
          dtype=dtype,
          conditional=c.conditional,
          operations=0,
          elements=0,
          bytes=0,
          asynchronous=0,
          overlapping_compute=0,
          overlapping_products=0,
        ),
      )
      elements = sum(n for d, n in c.elements if d == dtype)
      size = elements * width(dtype) // 8
      row['operations'] += 1
      row['elements'] += elements
      row['bytes'] += size
      row['asynchronous'] += size * (c.overlapping is not None)
      row['overlapping_compute'] += size * bool(c.overlapping)
      row['overlapping_products'] += size * (c.products > 0)
  return sorted(rows.values(), key=lambda r: (-r['bytes'], r['dtype']))


def sums(rows: list[dict]) -> dict[str, int]:
  """Elements that every step sums over devices, by dtype, from `totals`.

  Integers, and what is only summed now and then, do not count.
  """
  result = {}
  for row in rows:
    floating = 'float' in row['dtype']
    if row['kind'] in _SUMS and floating and not row['conditional']:
      result[row['dtype']] = result.get(row['dtype'], 0) + row['elements']
  return result


def gradient_dtypes(rows: list[dict], rest: int) -> list[str]:
  """The dtypes in which a training step sums its gradients.

  What XLA makes of a step has no names to go by, and of equal gradients it
  sends one; but a dtype in which more is summed than is not a gradient at all
  has gradients among it.

  Args:
    rows: from `totals`.
    rest: how many numbers the step sums that are not gradients: statistics and
      metrics.
  """
  return [dtype for dtype, n in sums(rows).items() if n > rest]


def width(dtype: str) -> int:
  """Bits of an element."""
  digits = re.search(r'\d+', dtype)
  return int(digits[0]) if digits else 8


def _collective(kind, operands, results, conditional, overlapping=None, products=0):
  """Counts the larger side: the whole array, also where each has a part."""
  arrays = max(operands, results, key=_size)
  return Collective(
    kind,
    tuple((_dtype(name), math.prod(shape)) for name, shape in arrays),
    _size(arrays),
    conditional,
    overlapping,
    products,
  )


def _size(arrays):
  return sum(math.prod(shape) * width(_dtype(name)) // 8 for name, shape in arrays)


def _dtype(name):
  """XLA's and MLIR's names of a dtype as NumPy's; others as they are."""
  if name in ('pred', 'i1'):
    return 'bool'
  name = name.replace('f8e', 'float8_e')
  match = _NUMBER.fullmatch(name)
  return _NAMES[match[1]] + match[2] if match else name


def _done(program, start):
  """The instruction that waits for what `start` began."""
  for user in program.users(start, lambda u: u.opcode.endswith('-update')):
    if user.opcode.endswith('-done'):
      return user
  return None


def _around(program, instruction):
  """What calls the computation of an instruction, and what calls that."""
  while instruction := program.caller(instruction):
    yield instruction


def _computes(instruction):
  kind = instruction.opcode.removesuffix('-start').removesuffix('-done')
  return instruction.opcode not in _IDLE and kind not in KINDS
