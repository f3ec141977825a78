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
import time
from typing import Any, NamedTuple, NoReturn

from anp_jax.config import urls

VARIABLE = 'ANP_GENERATION'
HELD_BACK = signal.SIGTERM, signal.SIGUSR1  # during a restart


class Generation(NamedTuple):
  """What a process knows of its run when it starts.

  Attributes:
    number: number of restarts before.
    rank: rank of this process, which it keeps; -1: the launcher's.
    addresses: host and port of each process that may live, by rank.
    lost: why each process is missing that was lost at the last restart, by rank.
    coordinator: rank of the coordinator; -1: the lowest rank that answers.
    sizes: numbers of processes over which the batch divides.
    step: last step that this process had begun.
    stops: whether all were told to stop, which they do after a step.
    devices: ordinals of the GPUs that this process uses; None: all it sees.
    started_at: seconds since 1970 at which the run began, by its first coordinator's
      clock, which tell it from others; 0: it has not.
    lost_at: seconds since 1970 at which the last generation ended.
    descriptors: inherited files by name.
  """

  number: int = 0
  rank: int = -1
  addresses: dict[int, tuple[str, int]] = {}
  lost: dict[int, str] = {}
  coordinator: int = -1
  sizes: tuple[int, ...] = ()
  step: int = 0
  stops: bool = False
  devices: list[int] | None = None
  started_at: float = 0.0
  lost_at: float = 0.0
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
  result['lost'] = {int(rank): why for rank, why in values['lost'].items()}
  return result


def addresses(values: Mapping[str, Sequence]) -> dict[int, tuple[str, int]]:
  """Returns addresses by rank from JSON values."""
  return {int(rank): (host, port) for rank, (host, port) in values.items()}


def keep(name: str, descriptor: int) -> None:
  """Has the next generation of this process inherit an open file."""
  _descriptors[name] = descriptor


def restart(generation: Generation) -> NoReturn:
  """Replaces this program by itself in the next generation; any thread may call it.

  Files that this program has inherited are handed on even if it has not come to use them.

  Raises:
    OSError: if that cannot be.
  """
  descriptors = {**generation.descriptors, **_descriptors}
  for descriptor in map(int, os.listdir('/proc/self/fd')):
    if descriptor > 2:
      with contextlib.suppress(OSError):  # the one that lists them
        os.set_inheritable(descriptor, descriptor in descriptors.values())
  generation = generation._replace(lost_at=time.time(), descriptors=descriptors)
  environment = {**os.environ, **urls.inherited(), VARIABLE: json.dumps(generation._asdict())}
  # They wait until the next program listens: else they would end it, and its copies.
  signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
  os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
