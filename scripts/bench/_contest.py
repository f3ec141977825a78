"""Contestants that take turns: processes, environments, rounds, ratios.

Each contestant is a process of its own, which sleeps while another takes its
turn. So that no one is always first after another, a round has them in an order
by chance. A ratio is of one round.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from typing import NamedTuple

from anp_jax.system import stopwatch, xla_flags
from scripts.bench import _common

_ENVIRONMENT = {
  # Several workers share a GPU, and none may take all of its memory.
  'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
  # An error's last line is to be its own.
  'JAX_TRACEBACK_FILTERING': 'off',
}


class PeerLostError(RuntimeError):
  """A worker ended without an answer."""


class Worker:
  """A process that holds one contestant, asleep until it is asked.

  Attributes:
    ready: its first answer.
  """

  def __init__(self, module: str, arguments: Sequence[str], environment: dict[str, str]):
    """Starts a worker process, and waits for its first answer.

    Args:
      module: name of a module of scripts/bench, run with --worker.
      arguments: that follow.
      environment: variables of the process.

    Raises:
      PeerLostError: if it ends before.
    """
    self._errors = tempfile.TemporaryFile('w+')
    self._process = subprocess.Popen(
      [sys.executable, '-m', f'scripts.bench.{module}', '--worker', *arguments],
      cwd=_common.ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      text=True,
      env=environment,
    )
    try:
      self.ready = self._answer()
    except BaseException:
      self.close()
      raise

  def ask(self, **question) -> dict:
    """Sends a question, and waits for its answer.

    Raises:
      PeerLostError: if the process ends before.
    """
    with contextlib.suppress(BrokenPipeError):  # the answer says why
      self._process.stdin.write(json.dumps(question) + '\n')
      self._process.stdin.flush()
    return self._answer()

  def close(self):
    """Ends the process."""
    self._process.kill()
    self._process.communicate()
    self._errors.close()

  def _answer(self):
    line = self._process.stdout.readline()
    if not line:
      self._errors.seek(0)
      lines = [x for x in self._errors.read().splitlines() if x.strip()]
      raise PeerLostError(lines[-1] if lines else 'it ended without a word')
    return json.loads(line)


def questions() -> tuple[Iterator[dict], Callable]:
  """A worker's side: the questions, and a function (**values) that answers.

  What libraries print goes to standard error from here on, for it must not get
  between the answers.
  """
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)

  def answer(**values):
    print(json.dumps(values), file=answers, flush=True)

  return (json.loads(line) for line in sys.stdin), answer


def environment(ours: bool, extra: dict | None = None) -> dict[str, str]:
  """Variables of a worker: main.py's settings of XLA are ours alone.

  Args:
    ours: whether the contestant is ours.
    extra: further variables.
  """
  result = os.environ | _ENVIRONMENT | (extra or {})
  # The allocator's are everyone's, for they make PyTorch quicker too.
  xla_flags.use_huge_pages(result, restart=lambda *_: None)
  if ours:
    xla_flags.enable(result)
  return result


def rounds(contestants: Sequence[str], count: int) -> Iterator[list[str]]:
  """Yields each round's order, by chance, the same in every run."""
  random_order = random.Random(0)
  for _ in range(count):
    order = list(contestants)
    random_order.shuffle(order)
    yield order


def times(
  workers: Mapping[str, Worker], count: int, question: Callable[[str], dict]
) -> dict[str, list[float]]:
  """Returns the seconds that workers answer, or of a step of 'steps', by contestant.

  Args:
    workers: by contestant.
    count: rounds.
    question: what a contestant is asked in each of them.
  """
  seconds: dict[str, list[float]] = {contestant: [] for contestant in workers}
  for order in rounds(list(workers), count):
    for contestant in order:
      words = question(contestant)
      reply = workers[contestant].ask(**words)
      seconds[contestant].append(reply['seconds'] / words.get('steps', 1))
  return seconds


class Over(NamedTuple):
  """How many times as fast as another one contestant is.

  Attributes:
    median, lowest: of the rounds' ratios.
    quartiles: (lower, upper), between which half of the rounds lie.
    fastest: the ratio of each one's fastest round, which others on the machine
      disturbed least.
  """

  median: float
  lowest: float
  quartiles: tuple[float, float]
  fastest: float


def over(seconds: Sequence[float], peer_seconds: Sequence[float]) -> Over:
  """Compares seconds, round by round, with another contestant's."""
  ratios = [b / a for a, b in zip(seconds, peer_seconds, strict=True)]
  low, median, high = stopwatch.quartiles(ratios)
  return Over(median, min(ratios), (low, high), min(peer_seconds) / min(seconds))


def row(label: str, ratio: float | Over, goal: float = 0) -> tuple:
  """One line of a table, as `HEADING` says, and whether the goal is met.

  Args:
    label: what is compared.
    ratio: ratio of one measurement, or those of the rounds.
    goal: 0: none; a negative one is not to be exceeded.
  """
  median, spread = ratio, ('', '', '')
  if isinstance(ratio, Over):
    low, high = ratio.quartiles
    median, spread = (
      ratio.median,
      (f'{ratio.lowest:.2f}', f'{low:.2f}-{high:.2f}', f'{ratio.fastest:.2f}'),
    )
  good = median >= goal if goal > 0 else median <= -goal
  return (
    label,
    f'{median:.2f}',
    *spread,
    f'{">=" if goal > 0 else "<="} {abs(goal)}' if goal else '',
    ('met' if good else 'missed') if goal else '',
  )


def images_per_second(label: str, images: int, seconds: Sequence[float]) -> tuple[tuple, float]:
  """Returns a line of the table, and the median rate.

  Args:
    label: what is timed.
    images: number of images per time.
    seconds: times of the rounds.
  """
  rate, lowest = (images / function(seconds) for function in (statistics.median, max))
  return (label, f'{rate:.1f}', f'{lowest:.1f}', *[''] * 4), rate


def faster_torch(seconds: dict[str, Sequence[float]]) -> str:
  """Returns the faster of PyTorch's contestants, '' if there is none."""
  peers = [name for name in seconds if name.startswith('torch')]
  return min(peers, key=lambda name: statistics.median(seconds[name]), default='')


def speeds(
  label: str, seconds: dict[str, Sequence[float]], goals: Mapping[str, float]
) -> tuple[list[tuple], dict[str, float]]:
  """Compares ours with each peer, and with the faster of PyTorch's.

  Args:
    label: what is timed.
    seconds: times of the rounds, by contestant; one is 'ours'.
    goals: for `row`, by contestant; 'torch' is the faster of PyTorch's.

  Returns:
    Lines of the table, and medians by 'over_flax' and the like.
  """
  rows, ratios, faster = [], {}, faster_torch(seconds)
  for name, peer_seconds in seconds.items():
    if name == 'ours':
      continue
    ratio = over(seconds['ours'], peer_seconds)
    ratios[f'over_{name}'] = ratio.median
    goal, text = goals.get(name, 0), f'{label}: times as fast as {name}'
    if name == faster:
      ratios['over_torch'] = ratio.median
      goal, text = goals.get('torch', 0), f'{text}, the faster torch'
    rows.append(row(text, ratio, goal))
  return rows, ratios


HEADING = ('median', 'lowest', 'quartiles', 'of fastest', 'goal', '')
