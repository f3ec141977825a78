"""The instructions of a compiled program, from its text."""

from collections.abc import Iterator
import dataclasses
import re

_COMPUTATION = re.compile(r'(?:ENTRY )?%?([\w.\-]+) \(.*\{$')
_INSTRUCTION = re.compile(r'\s+(?:ROOT )?%?([\w.\-]+) = (.*)')
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,]*)\]')
_REFERENCE = re.compile(r'%([\w.\-]+)')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PAIRS = re.compile(r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}')
_PRODUCT_CALL = re.compile('conv|gemm|matmul|dot', re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction of a compiled program.

  Attributes:
    name: unique name in the program.
    opcode: operation, such as 'fusion'.
    arrays: dtype and dimensions of each result; a tuple has several.
    operands: names of instructions.
    computation: name of its computation.
    called: names of the computations that it calls.
    target: target of a custom call, else ''.
    pairs: number of (source, target) devices of a permutation, else 0.
  """

  name: str
  opcode: str
  arrays: tuple[tuple[str, tuple[int, ...]], ...]
  operands: tuple[str, ...]
  computation: str
  called: tuple[str, ...]
  target: str = ''
  pairs: int = 0


class Program:
  """The instructions of a compiled program, their users and callers.

  Attributes:
    instructions: instructions by name.
  """

  def __init__(self, text: str):
    """Reads the text from `jax.stages.Compiled.as_text`."""
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
    self._members: dict[str, list[Instruction]] = {}
    self._users: dict[str, list[Instruction]] = {}
    self._callers: dict[str, Instruction] = {}
    for i in parsed:
      self._members.setdefault(i.computation, []).append(i)
      for operand in i.operands:
        self._users.setdefault(operand, []).append(i)
      for called in i.called:
        self._callers.setdefault(called, i)

  def callers(self, instruction: Instruction) -> Iterator[Instruction]:
    """Yields the first caller of an instruction's computation, that one's caller, and so on."""
    while caller := self._callers.get(instruction.computation):
      yield caller
      instruction = caller

  def has_product(self, instruction: Instruction) -> bool:
    """Returns whether an instruction is, or calls, a matrix product or a convolution."""
    if instruction.opcode in ('dot', 'convolution') or _PRODUCT_CALL.search(instruction.target):
      return True
    members = (m for called in instruction.called for m in self._members.get(called, ()))
    return any(map(self.has_product, members))

  def done(self, start: Instruction) -> Instruction | None:
    """Returns the instruction that waits for what `start` began; None if there is none."""
    queue = [start]
    for i in queue:
      for user in self._users.get(i.name, ()):
        if user.opcode.endswith('-done'):
          return user
        if user.opcode.endswith('-update'):
          queue.append(user)
    return None


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
  target = _TARGET.search(attributes)
  pairs = _PAIRS.search(attributes)
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
    computation,
    tuple(called),
    target[1] if target else '',
    pairs[1].count('{') if pairs else 0,
  )


def _closing(text, start):
  """Where the parenthesis that opens at `start` closes."""
  depth = 0
  for i in range(start, len(text)):
    depth += {'(': 1, ')': -1}.get(text[i], 0)
    if not depth:
      return i
  return len(text)
