"""The collectives of a program, from its text.

Two texts are read: StableHLO, which JAX gives to XLA, and the HLO that XLA
compiled it to, in the order of its schedule.
"""

import collections
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
# In a ring of W devices, (W - 1) / W of the array leaves each device: twice in a
# sum, once in any other collective but a permutation.
_TWICE = ('all-reduce',)
_COUNTS = (
  *('operations', 'elements', 'bytes', 'permuted'),
  *('asynchronous', 'overlapping_compute', 'overlapping_products'),
)
_ASKED = re.compile('"?stablehlo\\.(' + '|'.join(k.replace('-', '_') for k in KINDS) + ')"?')
_BRANCHES = re.compile(r'"?stablehlo\.(?:case|if)"?\(')
# An operation's types end the line on which its region ends, if it has one.
_TYPES = re.compile(r' : \((tensor<.*>)\) -> \(?(tensor<.*>)\)?\s*(?:loc\(|$)')
_TENSOR = re.compile(r'tensor<((?:\d+x)*)([a-z]\w*)>')
_NUMBER = re.compile(r'(bf|f|s|si|i|u|ui|c)(\d+)')
_NAMES = {'bf': 'bfloat', 'f': 'float', 'c': 'complex', 's': 'int', 'si': 'int', 'i': 'int'}
_NAMES |= {'u': 'uint', 'ui': 'uint'}
# Instructions of a schedule that take no time of the units that compute.
_IDLE = frozenset(
  'parameter constant tuple get-tuple-element bitcast copy after-all partition-id '
  'replica-id opt-barrier async-start async-update async-done copy-start copy-done '
  'slice-start slice-done domain iota'.split()
)


@dataclasses.dataclass(frozen=True)
class Collective:
  """One operation between devices.

  Attributes:
    kind: one of KINDS.
    elements: dtype (NumPy's name) and number of elements of each whole array, which is an
      all-gather's result and a reduce-scatter's operand.
    size: bytes of all arrays.
    conditional: whether it stands in a branch, which not every step takes.
    overlapping: instructions that compute between its start and its end; None if it is
      synchronous.
    products: matrix products and convolutions among these instructions, or within them.
    pairs: number of (source, target) devices of a permutation, else 0.
  """

  kind: str
  elements: tuple[tuple[str, int], ...]
  size: int
  conditional: bool = False
  overlapping: int | None = None
  products: int = 0
  pairs: int = 0


def asked(text: str) -> list[Collective]:
  """Returns the collectives in JAX's StableHLO, without those that XLA will insert."""
  collectives: list[Collective] = []
  kind, branch = None, None
  for line in text.splitlines():
    indent = len(line) - len(line.lstrip())
    if branch is None and _BRANCHES.search(line):
      branch = indent
    elif indent == branch and line.lstrip().startswith('})'):
      branch = None
    if match := _ASKED.search(line):
      kind = match[1].replace('_', '-')
    if kind and (types := _TYPES.search(line)):
      operands, results = (
        [(dtype, [int(n) for n in shape.split('x') if n]) for shape, dtype in _TENSOR.findall(side)]
        for side in types.groups()
      )
      collectives.append(_collective(kind, operands, results, branch is not None))
      kind = None
  return collectives


def compiled(text: str) -> list[Collective]:
  """Returns the collectives of a compiled program; one in a loop's body counts once.

  Args:
    text: text from `jax.stages.Compiled.as_text`.
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
    callers = list(program.callers(i))
    start = next((c for c in callers[:1] if c.opcode == 'async-start'), i)
    done = program.done(start) if start is not i or kind != i.opcode else None
    conditional = any(c.opcode == 'conditional' for c in callers)
    operands = [a for o in i.operands for a in program.instructions[o].arrays]
    # The result of a start repeats its operands, among other things.
    collective = _collective(kind, operands, (done or i).arrays, conditional)
    collective = dataclasses.replace(collective, pairs=i.pairs)
    if done and scheduled:
      between = schedule[place[start.name] + 1 : place[done.name]]
      working = [b for b in between if _computes(b)]
      products = sum(map(program.has_product, working))
      collective = dataclasses.replace(collective, overlapping=len(working), products=products)
    collectives.append(collective)
  return collectives


def totals(collectives: Iterable[Collective]) -> list[dict]:
  """Returns sums by kind, dtype and whether conditional, the most bytes first.

  Returns:
    Dicts of kind, dtype, conditional, operations, elements, bytes and the bytes that all devices
    send in permutations (`permuted`), with those of the bytes
    that are `asynchronous`, which the program does not wait for at once, and those that travel
    while anything (`overlapping_compute`) or a matrix product or convolution
    (`overlapping_products`) is computed.
  """
  rows: dict[tuple, dict] = {}
  for c in collectives:
    for dtype in dict.fromkeys(d for d, _ in c.elements):
      key = {'kind': c.kind, 'dtype': dtype, 'conditional': c.conditional}
      row = rows.setdefault(tuple(key.values()), key | dict.fromkeys(_COUNTS, 0))
      elements = sum(n for d, n in c.elements if d == dtype)
      size = elements * width(dtype) // 8
      row['operations'] += 1
      row['elements'] += elements
      row['bytes'] += size
      row['permuted'] += size * c.pairs
      row['asynchronous'] += size * (c.overlapping is not None)
      row['overlapping_compute'] += size * bool(c.overlapping)
      row['overlapping_products'] += size * (c.products > 0)
  return sorted(rows.values(), key=lambda r: (-r['bytes'], r['dtype']))


def sums(rows: list[dict]) -> dict[str, int]:
  """Returns the elements that every step sums over devices, by dtype, from `totals`.

  Integers and conditional sums do not count.
  """
  counts: collections.Counter = collections.Counter()
  for row in rows:
    if row['kind'] in _SUMS and 'float' in row['dtype'] and not row['conditional']:
      counts[row['dtype']] += row['elements']
  return dict(counts)


def gradient_dtypes(rows: list[dict], rest: int) -> list[str]:
  """Returns the dtypes in which a training step sums its gradients.

  A compiled step has no names, and sends equal gradients once; but if more
  numbers are summed in a dtype than are no gradients, gradients are among them.

  Args:
    rows: sums from `totals`.
    rest: count of the numbers that the step sums and that are not gradients: statistics and
      metrics.
  """
  return [dtype for dtype, n in sums(rows).items() if n > rest]


def sent(rows: list[dict], devices: int, groups: int = 1, exchanges: float = 0.0) -> float:
  """Returns the MB (1e6 bytes) of a program's collectives in a mean step.

  Args:
    rows: sums from `totals`.
    devices: devices of the program.
    groups: groups of devices; conditional collectives travel between groups, all others within
      each.
    exchanges: share of the steps that take the branch.
  """
  group_devices = devices // groups
  # Sums of (devices of a ring - 1) over all rings.
  within, between = (groups * (group_devices - 1), group_devices * (groups - 1) * exchanges)
  size = 0.0
  for r in rows:
    rings = between if r['conditional'] else within
    if r['permuted']:
      size += r['permuted'] * (exchanges if r['conditional'] else 1)
    else:
      size += rings * r['bytes'] * (2 if r['kind'] in _TWICE else 1)
  return size / 1e6


def width(dtype: str) -> int:
  """Returns the bits of an element."""
  digits = re.search(r'\d+', dtype)
  return int(digits[0]) if digits else 8


def _collective(kind, operands, results, conditional) -> Collective:
  """Counts the larger side, which is the whole array where each device has a part."""
  arrays = max(operands, results, key=_size)
  elements = tuple((_dtype(name), math.prod(shape)) for name, shape in arrays)
  return Collective(kind, elements, _size(arrays), conditional)


def _size(arrays):
  return sum(math.prod(shape) * width(_dtype(name)) // 8 for name, shape in arrays)


def _dtype(name):
  """NumPy's name of a dtype of XLA or MLIR; other names stay."""
  if name in ('pred', 'i1'):
    return 'bool'
  name = name.replace('f8e', 'float8_e')
  match = _NUMBER.fullmatch(name)
  return _NAMES[match[1]] + match[2] if match else name


def _computes(instruction):
  kind = instruction.opcode.removesuffix('-start').removesuffix('-done')
  return instruction.opcode not in _IDLE and kind not in KINDS
