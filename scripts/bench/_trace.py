"""How long each instruction of a program took, from a profile.

On a CPU an instruction's own event covers only the call that starts it. The
rest is done in tasks that the call gives to a pool, in parallel with others,
so an event's duration is no measure of its cost. The profile has a number for
each task, at the moment it is given away and again where it is done: so what a
thread works for is always known.
"""

import collections
from collections.abc import Iterable
import dataclasses
import glob
import os

import jax

# These run other instructions, which have events of their own.
_CONTAINERS = ('while', 'conditional', 'call')
_GIVEN = 'ThreadpoolListener::Record'
_BEGUN = 'ThreadpoolListener::StartRegion'
_DONE = 'ThreadpoolListener::StopRegion'


@dataclasses.dataclass(frozen=True)
class Event:
  """An event of a profile.

  Attributes:
    thread: names of the plane (host or device) and of the line in it.
    name: of the event.
    start: nanoseconds.
    duration: nanoseconds.
    stats: such as 'hlo_op', the instruction, and the numbers of tasks: '_p'
      of one given away, '_c' of one begun.
  """

  thread: tuple[str, str]
  name: str
  start: float
  duration: float = 0.0
  stats: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Spent:
  """What a profile says of a program's instructions.

  Attributes:
    seconds: name to wall time, over all runs.
    runs: name to how often it ran.
    threads: at work on average while any was.
  """

  seconds: dict[str, float]
  runs: dict[str, int]
  threads: float


def read(folder: str) -> list[Event]:
  """The events of the newest profile that `jax.profiler.trace` left.

  Raises:
    FileNotFoundError: if there is none.
  """
  pattern = os.path.join(folder, '**', '*.xplane.pb')
  files = glob.glob(pattern, recursive=True)
  if not files:
    raise FileNotFoundError(f'no profile in {folder}')
  newest = max(files, key=os.path.getmtime)
  return [
    Event(
      (plane.name, line.name),
      e.name,
      e.start_ns,
      e.duration_ns,
      {key: value for key, value in e.stats if key},
    )
    for plane in jax.profiler.ProfileData.from_file(newest).planes
    for line in plane.lines
    for e in line.events
  ]


def spent(events: Iterable[Event], program) -> Spent:
  """Wall time of each instruction; those that overlap share it.

  Each moment is divided equally among the threads at work. A thread works for
  the instruction it is inside of, or for the one that gave away the task it
  does. Time in which no thread works for any is nobody's.

  Args:
    events: from `read`.
    program: `program_lib.Program` that was run.
  """
  events = _shown(events)
  spans = [(name, e) for e in events if (name := _instruction(e, program))]
  names = {name for name, _ in spans}

  def shows_its_parts(name):
    instruction = program.instructions[name]
    return instruction.opcode in _CONTAINERS and any(
      i.name in names for i in program.inside(instruction)
    )

  loops = {name for name in names if shows_its_parts(name)}
  spans = [(name, e) for name, e in spans if name not in loops]
  runs = collections.Counter(name for name, _ in spans)
  seconds, worked = _divided(_points(events, spans))
  seconds = {name: seconds[name] for name in runs}
  return Spent(seconds, runs, worked / (sum(seconds.values()) or 1))


def _shown(events):
  """Events of the threads that show instructions.

  A GPU's profile shows kernels on its streams and the same time again on lines
  derived from them; a TPU's shows instructions on the line 'XLA Ops'.
  """
  events = list(events)
  for prefix in ('Stream', 'XLA Ops'):
    chosen = [
      e for e in events if e.thread[0].startswith('/device:') and e.thread[1].startswith(prefix)
    ]
    if chosen:
      return chosen
  return events


def _instruction(event, program):
  """The instruction of a program that an event is a run of, or None."""
  name = event.stats.get('hlo_op', event.name)
  module = event.stats.get('hlo_module', program.name).partition('(')[0]
  is_ours = name in program.instructions and module == program.name
  return name if is_ours else None


def _points(events, spans):
  """(moment, order at one moment, thread, change, of what) in time's order."""
  points = []
  for i, (name, e) in enumerate(spans):
    if e.duration > 0:
      points.append((e.start, 3, e.thread, 'enter', (i, name)))
      points.append((e.start + e.duration, 0, e.thread, 'leave', (i, name)))
  for e in events:
    if e.name == _GIVEN:
      points.append((e.start, 4, e.thread, 'give', e.stats.get('_p')))
    elif e.name == _BEGUN:
      points.append((e.start, 2, e.thread, 'begin', e.stats.get('_c')))
    elif e.name == _DONE:
      points.append((e.start, 1, e.thread, 'done', None))
  return sorted(points, key=lambda point: point[:2])


def _divided(points):
  """Seconds of each name, and of all threads together."""
  seconds, worked, last = collections.Counter(), 0.0, 0.0
  stacks = collections.defaultdict(list)  # what each thread is in, outer first
  givers = {}  # task to the instruction it is done for
  working = {}  # thread to the instruction it works for
  for moment, _, thread, change, what in points:
    for name in working.values():
      seconds[name] += 1e-9 * (moment - last) / len(working)
    worked += 1e-9 * (moment - last) * len(working)
    last, stack = moment, stacks[thread]
    if change == 'give':
      givers[what] = working.get(thread)
    elif change == 'enter':
      stack.append(what)
    elif change == 'leave':
      stack.remove(what)
    elif change == 'begin':
      stack.append(('task', givers.get(what)))
    elif stack and stack[-1][0] == 'task':  # a profile may begin inside of one
      stack.pop()
    working.pop(thread, None)
    if stack and stack[-1][1]:
      working[thread] = stack[-1][1]
  return seconds, worked
