"""The generations of an elastic run: its processes restart in place and go on.

JAX cannot be closed while a neighbour lives, whose collective this process then never
leaves. So each process replaces its own program (`os.execv`) and keeps its number:
launchers notice nothing, threads in native code end, and an accelerator's memory is
free. What the next program must know is in a variable of the environment; open ports
and copies of the state are descriptors that it inherits.
"""

from collections.abc import Mapping, Sequence
import contextlib
import json
import os
import signal
import sys
import threading
from typing import Any, NamedTuple, NoReturn

from anp_jax.config import urls

VARIABLE = 'ANP_GENERATION'
HELD_BACK = signal.SIGTERM, signal.SIGUSR1  # during a restart
# Held while a file that the next generation inherits is not whole: a restart waits for it,
# but not for one that hangs, or longer than the other processes wait for this one.
writing = threading.RLock()
WRITTEN_WITHIN = 10.0  # seconds


class Interruption(NamedTuple):
  """The end of the last generation that has computed a step.

  Attributes:
    at: seconds since 1970; 0: there is none.
    step: last step whose numbers were read.
    names: names of the processes that trained, by rank.
  """

  at: float = 0.0
  step: int = 0
  names: dict[int, str] = {}


class Generation(NamedTuple):
  """What a process knows of its run when it starts.

  Attributes:
    number: number of restarts before.
    rank: rank of this process, which it keeps; -1: the launcher's.
    addresses: host and port of each process that may live, by rank.
    lost: why each process is missing that was lost since the last step, by rank.
    coordinator: rank of the coordinator; -1: the lowest rank that answers.
    sizes: numbers of processes over which the batch divides.
    stops: whether all were told to stop, which they do after a step.
    devices: ordinals of the GPUs that this process uses; None: all it sees.
    started_at: seconds since 1970 at which the run began, by its first coordinator's
      clock, which tell it from others; 0: it has not.
    interruption: what the restarts since then go on from.
    descriptors: inherited files by name.
  """

  number: int = 0
  rank: int = -1
  addresses: dict[int, tuple[str, int]] = {}
  lost: dict[int, str] = {}
  coordinator: int = -1
  sizes: tuple[int, ...] = ()
  stops: bool = False
  devices: list[int] | None = None
  started_at: float = 0.0
  interruption: Interruption = Interruption()
  descriptors: dict[str, int] = {}


FIRST = Generation()
_descriptors: dict[str, int] = {}  # those of this program, by name


def current(environment: Mapping[str, str] = os.environ) -> Generation:
  """Returns this program's generation, the first one if nothing is inherited."""
  text = environment.get(VARIABLE)
  return Generation(**parsed(json.loads(text))) if text else FIRST


def parsed(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns fields of a generation from JSON values, whose keys are text."""
  result = dict(values, addresses=addresses(values['addresses']), sizes=tuple(values['sizes']))
  result['lost'] = _by_rank(values['lost'])
  if 'interruption' in values:
    at, step, names = values['interruption']
    result['interruption'] = Interruption(at, step, _by_rank(names))
  return result


def addresses(values: Mapping[str, Sequence]) -> dict[int, tuple[str, int]]:
  """Returns addresses by rank from JSON values."""
  return {rank: (host, port) for rank, (host, port) in _by_rank(values).items()}


def keep(name: str, descriptor: int) -> None:
  """Has the next generation of this process inherit an open file."""
  _descriptors[name] = descriptor


def restart(generation: Generation) -> NoReturn:
  """Replaces this program by itself in the next generation; any thread may call it.

  It waits for a file that is being written. Files that this program has inherited are handed
  on even if it has not come to use them.

  Raises:
    OSError: if that cannot be.
  """
  is_whole = writing.acquire(timeout=WRITTEN_WITHIN)
  try:
    _execute(generation)
  finally:
    if is_whole:
      writing.release()


def _execute(generation) -> NoReturn:
  descriptors = {**generation.descriptors, **_descriptors}
  for descriptor in map(int, os.listdir('/proc/self/fd')):
    if descriptor > 2:
      with contextlib.suppress(OSError):  # the one that lists them
        os.set_inheritable(descriptor, descriptor in descriptors.values())
  generation = generation._replace(descriptors=descriptors)
  environment = {**os.environ, **urls.inherited(), VARIABLE: json.dumps(generation._asdict())}
  # They wait until the next program listens: else they would end it, and its copies.
  signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
  os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _by_rank(values):
  return {int(rank): value for rank, value in values.items()}
