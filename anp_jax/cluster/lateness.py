"""Which process holds the others up, and by what.

In a synchronous run all steps take as long as the slowest process's; what differs is
how long each waits for input, how long its threads want a core, and how far it is from
the others. Where each process makes steps of its own, only one that is stuck is named.
All figures are of the last seconds.
"""

from collections.abc import Callable, Mapping, Sequence
import re
import statistics
from typing import NamedTuple

from anp_jax.cluster import members as members_lib, watchdog

# Seconds after which a silence, or a phase other than a start, is worth a word.
SILENT, _LONG = 3.0, 5.0
# How many times the others' time makes a process late, and which part of a step at least.
_RATIO, _PART = 1.25, 0.1
_MOST = 0.5  # part of a step
_LASTS = 3.0  # seconds until a verdict is worth a line of the log
NOBODY = 'no process is late'
_KINDS = 'input', 'computing'
_DOING = {
  'input': 'waiting for input',
  'step': 'in one step',
  'saving': 'saving',
  'evaluating': 'evaluating',
}


class Row(NamedTuple):
  """One process, over the last seconds.

  Attributes:
    name: name for people: 'rank 1 on node2'.
    phase: what it does; 'spare' for one that does not train.
    step: step that it computes.
    seconds: seconds since the phase last moved.
    silence: seconds since the process was heard.
    input: milliseconds of a step that it waits for input.
    rest: milliseconds of all else of a step.
    pauses: milliseconds of a step that it evaluates, saves, and waits for others' saves.
    cpu: cores that it uses.
    delay: cores that its threads want and do not get.
    round_trip: milliseconds to another host and back; 0: unknown.
    compared: kinds of lateness in which it compares with the others.
  """

  name: str
  phase: str
  step: int
  seconds: float
  silence: float
  input: float = 0.0
  rest: float = 0.0
  pauses: Sequence[float] = ()
  cpu: float = 0.0
  delay: float = 0.0
  round_trip: float = 0.0
  compared: Sequence[str] = ()


def rows(members: members_lib.Members, now: float) -> list[Row]:
  """Describes the processes of a run, by rank.

  Args:
    members: processes of the run.
    now: seconds of the clock of `Member.last_heard`.
  """
  here = ((rank, member) for rank, member in sorted(members.items()) if not member.left)
  return [_row(member, rank in members.ranks, now) for rank, member in here]


def _row(member, trains, now):
  state = member.state
  row = Row(
    member.name,
    state.get('phase', 'starting') if trains else 'spare',
    state.get('step', 0),
    state.get('seconds', 0.0),
    now - member.last_heard,
  )
  if len(member.history) < 2 or not trains:
    return row
  (begin, first), (end, last) = member.history[0], member.history[-1]
  seconds, steps = end - begin, last['step'] - first['step']
  if seconds <= 0 or 'spent' not in first:
    return row
  spent = {k: v - first['spent'].get(k, 0.0) for k, v in last['spent'].items()}
  row = row._replace(
    cpu=(last['cpu'] - first['cpu']) / seconds,
    delay=(last['delay'] - first['delay']) / seconds,
    round_trip=1000 * last['round_trip'],
  )
  # Where processes make steps of their own, a step's number does not count them.
  if steps <= 0 or not member.info['steps_together']:
    return row
  # A run that is resumed comes from step 0 to its own without making a step.
  if first['phase'] not in (*watchdog.STEPPING, *watchdog.PAUSES):
    return row
  phases = *watchdog.STEPPING, *watchdog.PAUSES
  waits, works, *pauses = (1000 * spent.get(phase, 0.0) / steps for phase in phases)
  # What a GPU does is not seen here.
  compared = _KINDS if member.info['platform'] == 'cpu' else _KINDS[:-1]
  return row._replace(input=waits, rest=works, pauses=pauses, compared=compared)


def excess(table: Sequence[Row]) -> dict[str, float]:
  """Milliseconds of a step by which input or computing exceeds the others' median, by name.

  Args:
    table: rows of all processes; those that do not compare with others have none.
  """
  stepping = [row for row in table if row.compared]
  if len(stepping) < 2:
    return {}
  kinds = [{row.name: row.input for row in stepping}]
  if all('computing' in row.compared for row in stepping):
    kinds.append(_needs(stepping))
  return {
    row.name: max(0.0, *(times[row.name] - _of_others(times, row.name) for times in kinds))
    for row in stepping
  }


def verdict(table: Sequence[Row]) -> str:
  """Names the process that holds the others up; begins with NOBODY if none does.

  Args:
    table: rows of all processes.
  """
  trained = [row for row in table if row.phase != 'spare']
  silent = [row for row in trained if row.silence > SILENT]
  if silent:
    return f'{_names(silent)} silent for {max(row.silence for row in silent):.0f} s'
  stuck = [row for row in trained if row.seconds > _LONG and row.phase in _DOING]
  if stuck and len(stuck) == len(trained) and len({row.phase for row in stuck}) == 1:
    seconds = min(row.seconds for row in stuck)
    return f'{NOBODY}; all have been {_DOING[stuck[0].phase]} for {seconds:.0f} s'
  # Those in a step wait for one that does something else.
  if stuck := [row for row in stuck if row.phase != 'step']:
    longest = max(stuck, key=lambda row: row.seconds)
    return f'{_names(stuck)} {_DOING[longest.phase]} for {longest.seconds:.0f} s'
  stepping = [row for row in trained if row.compared]
  if len(stepping) < 2:
    return NOBODY
  step = max(row.input + row.rest for row in stepping)
  paused = max(sum(row.pauses) for row in stepping)
  if not step:
    return NOBODY
  if late := _late({row.name: row.input for row in stepping}, step + paused, 'input'):
    return late
  # A save takes some of a step's cores.
  if paused >= _PART * (step + paused) or not all('computing' in r.compared for r in stepping):
    return NOBODY
  needs = _needs(stepping)
  waits = 1 - max(row.input + needs[row.name] for row in stepping) / step
  # One that is late in computing waits for nobody.
  if waits <= _MOST:
    return _late(needs, step, 'computing') or NOBODY
  trips = {row.name: row.round_trip for row in stepping}
  late = _late(trips, _PART * step, 'the network', 'there and back')
  return late or f'{NOBODY}; all wait for the network for {waits:.0%} of a step'


class Judge:
  """Logs the verdict on a run when it changes."""

  def __init__(self, log: Callable[[str], None]):
    """Creates a judge who has seen nothing; `log` is called with a line for people."""
    self._text = NOBODY
    self._log = log
    self._logged = NOBODY
    self._since = 0.0

  def look(self, table: Sequence[Row], now: float) -> None:
    """Looks at a run.

    Args:
      table: rows of all processes.
      now: seconds of a clock that never runs backwards.
    """
    text = verdict(table)
    if _essence(text) != _essence(self._text):
      self._since = now
    self._text = text
    if _essence(text) != _essence(self._logged) and now - self._since >= _LASTS:
      self._logged = text
      self._log(text)


def _essence(text):
  """A verdict without its figures."""
  return re.sub(r'[\d.]+( s|%| ms)', '', text.partition(';')[0])


def _names(some):
  names = members_lib.listed([row.name for row in some])
  return f'{names} {"has" if len(some) == 1 else "have"} been'


def _needs(stepping):
  """Milliseconds of a step that the threads of each process need, by name."""
  step = max(row.input + row.rest for row in stepping)
  return {row.name: (row.cpu + row.delay) * step for row in stepping}


def _of_others(times, name):
  """The median of all times but one."""
  return statistics.median(ms for other, ms in times.items() if other != name)


def _late(times: Mapping[str, float], step, what, per='a step'):
  """Names the process whose milliseconds exceed the others', of a step of so many."""
  name = max(times, key=lambda key: times[key])
  median = _of_others(times, name)
  if times[name] < _RATIO * median or times[name] - median < _PART * step:
    return ''
  return f'{name} is late in {what}: {times[name]:.0f} ms {per}, the others {median:.0f} ms'
