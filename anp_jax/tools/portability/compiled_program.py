"""The instructions of a compiled program, from its text."""

from collections.abc import Callable, Iterator
import dataclasses
import math
import re

_COMPUTATION = re.compile(r'(?:ENTRY )?%?([\w.\-]+) \(.*\{$')
_INSTRUCTION = re.compile(r'\s+(?:ROOT )?%?([\w.\-]+) = (.*)')
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,]*)\]')
_REFERENCE = re.compile(r'%([\w.\-]+)')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PRODUCT_CALL = re.compile('conv|gemm|matmul|dot', re.IGNORECASE)
# Of these no time is spent, or their op_name is an argument's and no layer's.
_NOT_COMPUTED = ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast')
_SLICES = ('slice', 'dynamic-slice', 'gather')


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction of a compiled program.

  Attributes:
    name: unique in the program.
    opcode: such as 'fusion'.
    arrays: results, pairs of dtype and dimensions; a tuple has several.
    operands: names of instructions.
    op_name: the scope it was traced in; '' where XLA made it up.
    computation: that it is written in.
    called: names of computations.
    target: of a custom call, else ''.
  """

  name: str
  opcode: str
  arrays: tuple[tuple[str, tuple[int, ...]], ...]
  operands: tuple[str, ...]
  op_name: str
  computation: str
  called: tuple[str, ...]
  target: str = ''

  @property
  def elements(self) -> tuple[int, ...]:
    """The number of elements of each result."""
    return tuple(math.prod(shape) for _, shape in self.arrays)

  @property
  def size(self) -> int:
    """Bytes of all results."""
    return sum(_bytes(dtype, shape) for dtype, shape in self.arrays)


class Program:
  """The instructions of a compiled program and how they hang together.

  Attributes:
    name: of the module.
    instructions: name to `Instruction`.
  """

  def __init__(self, text: str):
    """Reads what `jax.stages.Compiled.as_text` gives."""
    self.name = text.split(None, 2)[1].rstrip(',')
    computation, lines = '', []
    for line in text.splitlines():
      header = _COMPUTATION.match(line)
      if header:
        computation = header[1]
      elif match := _INSTRUCTION.match(line):
        lines.append((computation, match[1], match[2]))
    computations = {computation for computation, *_ in lines}
    parsed = [_parse(*line, computations) for line in lines]
    self.instructions = {i.name: i for i in parsed}
    self._members, self._users, self._callers = {}, {}, {}
    for i in parsed:
      self._members.setdefault(i.computation, []).append(i)
      for operand in i.operands:
        self._users.setdefault(operand, []).append(i)
      for called in i.called:
        self._callers.setdefault(called, i)

  def inside(self, instruction: Instruction) -> Iterator[Instruction]:
    """The instructions of all computations that one calls, however deep."""
    for called in instruction.called:
      for member in self._members.get(called, ()):
        yield member
        yield from self.inside(member)

  def caller(self, instruction: Instruction) -> Instruction | None:
    """The first that calls the computation an instruction is written in."""
    return self._callers.get(instruction.computation)

  def product(self, instruction: Instruction) -> Instruction | None:
    """The first matrix product or convolution in an instruction, if any."""
    for i in (instruction, *self.inside(instruction)):
      if i.opcode in ('dot', 'convolution') or _PRODUCT_CALL.search(i.target):
        return i
    return None

  def users(
    self, instruction: Instruction, through: Callable[[Instruction], bool] | None = None
  ) -> Iterator[Instruction]:
    """Those that need a result, directly or not, the nearest first.

    Args:
      instruction: whose result.
      through: whether the users of a user follow; None: always.

    Yields:
      Instructions.
    """

    def near(i):
      on = through is None or i is instruction or through(i)
      return self._users.get(i.name, ()) if on else ()

    yield from _walk(instruction, near)

  def operands(self, instruction: Instruction) -> Iterator[Instruction]:
    """Those whose results are needed, directly or not, the nearest first."""
    return _walk(instruction, lambda i: [self.instructions[o] for o in i.operands])

  def origin(self, instruction: Instruction) -> str:
    """The op_name that says which layer an instruction works for.

    A fusion works for the matrix product in it, or else for its root. What XLA
    inserted without a name, such as a transposition, works for the nearest
    user that has one, or else for the nearest operand, or for the loop around.

    Returns:
      An op_name, or '' where no neighbour has one.
    """
    if origin := self._own_origin(instruction):
      return origin
    for user in self.users(instruction):
      # In a fusion what reads the result comes before what follows it.
      inside = map(_scope, (*self.inside(user), user))
      if first := next(filter(None, inside), ''):
        return first
    for operand in self.operands(instruction):
      if origin := self._own_origin(operand):
        return origin
    caller = self.caller(instruction)
    return self.origin(caller) if caller else ''

  def traffic(self, instruction: Instruction) -> int:
    """Bytes of operands and results, each once: the least to be moved.

    An operand whose slices alone a fusion reads counts for what they hold,
    and a result written in place into a larger one for what is written.
    """
    operands = [self.instructions[o] for o in instruction.operands]
    if instruction.opcode in _SLICES:
      return 2 * instruction.size
    if instruction.opcode == 'dynamic-update-slice':
      return 2 * operands[1].size
    if instruction.opcode != 'fusion':
      return instruction.size + sum(o.size for o in operands)
    members = self._members[instruction.called[0]]
    # Parameters are written as parameter(0), parameter(1), ... in any order.
    read = sum(self._read(m) for m in members if m.opcode == 'parameter')
    root = self._last_computed(members)
    if root.opcode == 'dynamic-update-slice':
      update = self.instructions[root.operands[1]].size
      return read + update
    return read + instruction.size

  def _read(self, parameter):
    """Bytes that a fused computation reads of one of its parameters."""
    users = self._users.get(parameter.name, ())
    if users and all(u.opcode in _SLICES for u in users):
      return min(parameter.size, sum(u.size for u in users))
    if users and all(
      u.opcode == 'dynamic-update-slice' and u.operands[0] == parameter.name for u in users
    ):
      return 0
    return parameter.size

  def _last_computed(self, members):
    """The root of a computation, seen through bitcasts."""
    root = members[-1]
    while root.opcode == 'bitcast':
      root = self.instructions[root.operands[0]]
    return root

  def _own_origin(self, instruction):
    product = self.product(instruction)
    inside = reversed(tuple(self.inside(instruction)))
    scopes = map(_scope, (product or instruction, instruction, *inside))
    return next(filter(None, scopes), '')


def _parse(computation, name, rest, computations):
  """An instruction from what follows its ' = '."""
  if rest.startswith('('):
    close = _closing(rest, 0)
    result, rest = rest[: close + 1], rest[close + 2 :]
  else:
    result, _, rest = rest.partition(' ')
  opcode, _, _ = rest.partition('(')
  close = _closing(rest, len(opcode))
  # A constant's or a parameter's own text names nothing.
  operands = _REFERENCE.findall(rest[len(opcode) : close])
  attributes = rest[close:]
  op_name = _OP_NAME.search(attributes)
  target = _TARGET.search(attributes)
  attributes = attributes.partition(', metadata=')[0]
  called = [r for r in _REFERENCE.findall(attributes) if r in computations]
  return Instruction(
    name,
    opcode,
    tuple(
      (dtype, tuple(int(n) for n in shape.split(',') if n))
      for dtype, shape in _ARRAY.findall(result)
    ),
    tuple(operands),
    op_name[1] if op_name else '',
    computation,
    tuple(called),
    target[1] if target else '',
  )


def _scope(instruction):
  """Its op_name, if that is a layer's: a sum's own body is 'reduce_sum'."""
  computed = instruction.opcode not in _NOT_COMPUTED
  return instruction.op_name * (computed and '/' in instruction.op_name)


def _closing(text, start):
  """Where the parenthesis that opens at `start` closes."""
  depth = 0
  for i in range(start, len(text)):
    depth += {'(': 1, ')': -1}.get(text[i], 0)
    if not depth:
      return i
  return len(text)


def _bytes(dtype, shape):
  bits = 8 if dtype == 'pred' else int((re.findall(r'\d+', dtype) or [0])[0])
  return math.prod(shape) * bits // 8


def _walk(instruction, neighbours):
  """Breadth first, without the instruction itself."""
  visited, queue = {instruction.name}, [instruction]
  for i in queue:
    for near in neighbours(i):
      if near.name not in visited:
        visited.add(near.name)
        queue.append(near)
        yield near
