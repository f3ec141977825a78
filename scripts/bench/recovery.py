"""How long a run pauses when it loses a process, and when one comes.

  python -m scripts.bench.recovery --config=configs/lenet.py --rounds=8
  python -m scripts.bench.recovery --config=configs/resnet_anp.py:demo --rounds=3 \
    --config.model.norm_group=8
  python -m scripts.bench.recovery --rounds=0 --cost=3 [EMULATED]
  python -m scripts.bench.recovery --figure=docs/images/recovery.png EMULATED
  python -m scripts.bench.recovery --goodput=2700 --processes=16 --config.batch_size=720 EMULATED

A run of four processes on this machine loses one by `kill -9` in each round, the first
time process 0, and gets another one; the first round, which compiles, is not counted.
`lost` is the time from the kill to the next new step, `noticed` that until the others
restart (and the line about it is read), `joined` the time without a step when one comes.
With --cost, runs with cluster.elastic=auto, without its copies, and with off go on in
turns of ten seconds, and ratios of their rates are given; as runs of the same kind differ,
there are several, and intervals are of these. With --figure, two are lost, and one comes back.

With --goodput, processes are lost and come back at exponential times for so many seconds,
and the share of the undisturbed speed that was kept stands next to what the planner's
model expects of the run's own pauses, and to its arithmetic with the times that were drawn,
in each of 20 parts. The times are stratified samples: their sums do not vary. EMULATED are
--config.emulate.enabled=True --config.emulate.image_seconds=0.01
--config.emulate.step_seconds=0 --config.emulate.megabytes=1.
"""

import argparse
import contextlib
import heapq
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from anp_jax.config import command_line
from anp_jax.costs import goodput
from anp_jax.reporting import summaries
from anp_jax.system import drawing, stopwatch
from scripts.bench import _common

_BATCH = 96
_GOALS = {'lost': 10, 'noticed': 1, 'joined': 10}  # seconds
_WITHIN = 300.0  # seconds, for anything that is waited for
_WATCHED = 25.0  # seconds before and after each event of the figure
_SMOOTHED = 10  # looks at the step, of the figure's rates
_TURN = 10.0  # seconds that a run goes on while the other one is stopped
_PARTS = 20  # of a run with random losses
_KINDS = {
  'elastic': ('--config.cluster.elastic=auto',),
  'no copies': ('--config.cluster.elastic=auto', '--config.cluster.mirror_every=1000000000'),
  'off': ('--config.cluster.elastic=off',),
}


class Run:
  """The processes of a run, in a folder of its own; all end with it."""

  def __init__(self, folder: str, processes: int, *flags: str):
    """Starts them, and waits for the first steps."""
    self.workdir = os.path.join(folder, 'run')
    self._log = open(os.path.join(folder, 'log'), 'ab')
    self._flags = (f'--workdir={self.workdir}', *flags)
    where = f'--coordinator=127.0.0.1:{_common.free_port()}', f'--num_processes={processes}'
    self._processes = [self._start(*where, f'--process_id={i}') for i in range(processes)]
    self._offset, self._lines = 0, {}
    try:
      self.wait_for(lambda: self.step() > 3)
    except BaseException:
      self.close()
      raise

  def _start(self, *flags):
    command = [sys.executable, 'main.py', *flags, *self._flags]
    return subprocess.Popen(command, cwd=_common.ROOT, stdout=self._log, stderr=self._log)

  def lines(self, kind: str) -> list[dict]:
    """Returns the lines of one kind in metrics.jsonl, those that a restart replaced too."""
    with contextlib.suppress(FileNotFoundError):
      path = os.path.join(self.workdir, 'metrics.jsonl')
      self._offset = min(self._offset, os.path.getsize(path))  # a restart cuts it
      with open(path, 'rb') as f:
        f.seek(self._offset)
        for line in f.read().splitlines(keepends=True):
          if line.endswith(b'\n'):
            self._offset += len(line)
            with contextlib.suppress(ValueError):  # it was cut in the middle
              record = json.loads(line)
              self._lines.setdefault(record['kind'], []).append(record)
    return self._lines.get(kind, [])

  def step(self) -> int:
    """Returns the last step that was made."""
    return self.lines('train')[-1]['step'] if self.lines('train') else 0

  def watch(self, until: float) -> list[tuple[float, int]]:
    """Returns moments of the monotonic clock with the last step, up to a moment.

    It reads metrics.jsonl before a restart cuts it.
    """
    steps = []
    while time.monotonic() < until:
      steps.append((time.monotonic(), self.step()))
      time.sleep(0.2)
    return steps

  def wait_for(self, condition, seconds=_WITHIN):
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
      if time.monotonic() > deadline or all(p.poll() is not None for p in self._processes):
        with open(self._log.name) as f:
          raise SystemExit(f'error: the run does not go on: {f.read()[-500:]}')
      time.sleep(0.05)

  def lose(self, index: int) -> None:
    """Kills a process."""
    self._processes[index].kill()
    self._processes[index].wait()

  def join(self, index: int) -> None:
    """Starts a process that takes the place of one that was lost."""
    self._processes[index] = self._start('--join')

  def seconds_of(self, change, index: int) -> tuple[float, float]:
    """Returns the seconds from `lose` or `join` to the next new step, and those without one."""
    before, begin = len(self.lines('restart')), time.monotonic()
    change(index)
    self.wait_for(lambda: len(self.lines('restart')) > before)
    seconds, restarted = time.monotonic() - begin, self.lines('restart')[-1]
    self.wait_for(lambda: self.step() > restarted['step'] + 5)
    return seconds, restarted['seconds']

  def signal(self, number: int) -> None:
    """Sends a signal to all processes."""
    for process in self._processes:
      process.send_signal(number)

  def close(self) -> None:
    """Kills all processes."""
    for process in self._processes:
      process.kill()
      process.wait()
    self._log.close()


def _flags():
  parser = argparse.ArgumentParser(description=__doc__)
  add = parser.add_argument
  add('--config', default='configs/lenet.py', help='recipe (default: %(default)s)')
  add('--rounds', type=int, default=4, help='rounds that count (default: %(default)s)')
  add('--cost', type=int, default=0, help='turns without a loss (default: none)')
  add('--runs', type=int, default=3, help='of each kind in --cost, 2 or more (%(default)s)')
  add('--figure', default='', help='a figure of the speed, in place of the rounds')
  add('--processes', type=int, default=4, help='processes (default: %(default)s)')
  add('--goodput', type=float, default=0, help='seconds with random losses, in place of the rounds')
  add('--mtbf', type=float, default=180, help='seconds between losses (default: %(default)s)')
  add('--seed', type=int, default=0, help='which processes are lost when (default: %(default)s)')
  add('--repair', type=float, default=60, help='seconds to its return (default: %(default)s)')
  flags, more = parser.parse_known_args()
  if flags.runs < 2:
    parser.error(f'--runs={flags.runs}: expected 2 or more')
  return flags, more


def _quartiles(values):
  low, middle, high = stopwatch.quartiles(values)
  return f'{middle:.1f} ({low:.1f} to {high:.1f})'


def main():
  """Loses and brings back processes, and shows how long it took."""
  flags, more = _flags()
  keys = {
    'data.source': 'synthetic',
    'data.synthetic_examples': '9600',
    'batch_size': str(_BATCH),
    'duration': '1000000 steps',
    'log.every': '1 steps',
    'log.tensorboard': 'False',
    'eval.every': '1000000 steps',
    'checkpoint.every': '1000000 steps',
    'schedule.name': 'constant',
  }
  arguments = [f'--config={flags.config}', *command_line.typed(keys), *more]
  with tempfile.TemporaryDirectory() as folder:
    if flags.figure or flags.goodput:
      arguments += ['--config.cluster.mirror_every=1'] * bool(flags.goodput)
      with contextlib.closing(Run(folder, flags.processes, *arguments)) as run:
        batch = int(command_line.split_overrides(more)[0].get('batch_size', _BATCH))
        (_goodput if flags.goodput else _draw)(run, flags, batch)
      return
    seconds = _rounds(folder, arguments, flags) if flags.rounds else {}
    rows = [('a process', 'seconds'), *((name, _quartiles(v)) for name, v in seconds.items())]
    ratios = {f'{n}_over_{_GOALS[n]}_s': statistics.median(seconds[n]) / _GOALS[n] for n in seconds}
    if flags.cost:
      for kind, over in _costs(folder, arguments, flags).items():
        cost = summaries.summarize(over)
        rows.append((f'rate, {kind} over elastic', f'{cost.mean:.3f} +- {cost.interval:.3f}'))
        ratios |= {f'{kind}_over_elastic': cost.mean, f'{kind}_interval': cost.interval}
  _common.show(f'{flags.config}, {flags.processes} processes', rows, ratios)


def _rounds(folder, arguments, flags):
  seconds = {name: [] for name in _GOALS}
  with contextlib.closing(Run(folder, flags.processes, *arguments)) as run:
    for number in range(flags.rounds + 1):
      total, pause = run.seconds_of(run.lose, number % flags.processes)
      seconds['lost'].append(total)
      seconds['noticed'].append(total - pause)
      seconds['joined'].append(run.seconds_of(run.join, number % flags.processes)[1])
  return {name: values[1:] for name, values in seconds.items()}


def _costs(folder, arguments, flags):
  """Rates over that of elastic runs, of runs that copy nothing and of others, by name.

  Of all runs one goes on at a time: their clocks do not count that the others are stopped.
  """
  rates = {kind: np.zeros((flags.runs, 2)) for kind in _KINDS}  # steps, and their seconds
  with contextlib.ExitStack() as stack:
    runs = {}
    for kind, number in itertools.product(rates, range(flags.runs)):
      place = os.path.join(folder, f'{kind} {number}')
      os.makedirs(place)
      run = Run(place, flags.processes, *arguments, *_KINDS[kind])
      runs[kind, number] = stack.enter_context(contextlib.closing(run))
      run.watch(time.monotonic() + _TURN)  # it chooses how often it copies
      run.signal(signal.SIGSTOP)
    chance = random.Random(flags.seed)
    for _ in range(flags.cost):
      for kind, number in chance.sample(sorted(runs), len(runs)):
        run = runs[kind, number]
        run.signal(signal.SIGCONT)
        run.watch(time.monotonic() + 1)
        before = len(run.lines('train'))
        run.watch(time.monotonic() + _TURN)
        first, *_, last = run.lines('train')[before:]
        rates[kind][number] += [last[key] - first[key] for key in ('step', 'time')]
        run.signal(signal.SIGSTOP)
  elastic, *controls = (steps / seconds for steps, seconds in (r.T for r in rates.values()))
  return dict(zip([*_KINDS][1:], (rate / elastic for rate in controls), strict=True))


def _exponential(mean, count, chance):
  """A stratified sample of exponential times, in random order."""
  times = [-math.log(1 - (i + 0.5) / count) for i in range(count)]
  chance.shuffle(times)
  return [mean * count * t / sum(times) for t in times]


def _goodput(run, flags, batch):
  """Compares the speed that a run keeps with the planner's model of its losses."""
  run.watch(time.monotonic() + 60)
  (begin, first), *_, (end, last) = run.watch(time.monotonic() + 90)
  undisturbed = (last - first) / (end - begin)
  steps, changes = _losses(run, flags)
  # The model counts a loss during another's pause itself.
  lost = [line['seconds'] for line in run.lines('restart') if len(line['lost']) == 1]
  joins = [line['seconds'] for line in run.lines('restart') if not line['lost']]
  if not (lost and joins):
    raise SystemExit(f'--goodput={flags.goodput:g}: expected time for a loss and a return')
  pauses = statistics.mean(lost), statistics.mean(joins)
  faults = goodput.Faults(flags.mtbf * flags.processes, flags.repair, 0, *pauses)
  lives = range(flags.processes + 1)
  used = [max((k for k in range(1, n + 1) if batch % k == 0), default=0) for n in lives]
  speeds = [count / used[-1] for count in used]  # emulated: all time is the images'
  # config.cluster.mirror_every=1, and no checkpoint
  copies = goodput.Copies(0, 1 / undisturbed), goodput.Copies(0, flags.goodput)
  expected = goodput.elastic(faults, used, speeds, *copies, flags.goodput)
  measured = _parts(*steps.T, flags.goodput) / undisturbed
  drawn = _parts(*_followed(changes, faults, used), flags.goodput)
  rest = summaries.summarize(measured - drawn)
  losses = sum(is_loss for *_, is_loss in changes)
  rows = [
    ('share of the speed without losses', 'value'),
    (f'measured, {losses} losses, {len(changes) - 1 - losses} returns', f'{measured.mean():.3f}'),
    ("the planner's model", f'{expected:.3f}'),
    ('its arithmetic with the times that were drawn', f'{drawn.mean():.3f}'),
    (f'measured less that, {_PARTS} parts', f'{rest.mean:.3f} +- {rest.interval:.3f}'),
    ('seconds of a loss, of a return', '{:.1f}, {:.1f}'.format(*pauses)),
  ]
  less = measured.mean() - expected
  ratios = {'minus_model': less, 'minus_drawn': rest.mean, 'interval': rest.interval}
  _common.show(f'{flags.config}, {flags.processes} processes', rows, ratios)


def _losses(run, flags):
  """Loses processes at random, which come back; returns the steps and what happened.

  Returns:
    (looks, 2): seconds since the begin, with the last step; and the changes, see `_followed`.
  """
  chance, begin = random.Random(flags.seed), time.monotonic()
  count = max(1, round(flags.goodput / flags.mtbf))
  losses = itertools.accumulate(_exponential(flags.mtbf, count, chance))
  repairs = _exponential(flags.repair, count, chance)
  events = [(at, -1) for at in losses]  # -1: a loss, else who comes
  alive, steps, changes = set(range(flags.processes)), [], []
  while events and events[0][0] < flags.goodput:
    at, rank = heapq.heappop(events)
    steps += run.watch(begin + at)
    changes.append((at, len(alive), rank < 0))
    if rank >= 0:
      run.join(rank)
      alive.add(rank)
    else:
      rank = chance.choice(sorted(alive))
      run.lose(rank)
      alive.remove(rank)
      heapq.heappush(events, (at + repairs.pop(), rank))
  steps += run.watch(begin + flags.goodput)
  return np.subtract(steps, (begin, 0)), [*changes, (flags.goodput, len(alive), False)]


def _parts(moments, done, end):
  """What is done per second in each part of a run."""
  return np.diff(np.interp(np.linspace(0, end, _PARTS + 1), moments, done)) * _PARTS / end


def _followed(changes, faults, used):
  """Moments of the model's run, and its seconds of full speed until then.

  Args:
    changes: moments with the processes that live before, and whether one is lost, else it
      returns; the last is the end.
    faults: the pauses.
    used: processes that compute where 0, 1, ... live.
  """
  moments, done, resume = [0.0], [0.0], 0.0
  for at, live, is_loss in changes:
    resumed = min(max(moments[-1], resume), at)
    moments += [resumed, at]
    done += [done[-1], done[-1] + (at - resumed) * used[live] / used[-1]]
    if is_loss:  # of a spare: no pause
      resume = max(resume, at + faults.in_place * used[live] / live)
    elif used[live] < used[min(live + 1, len(used) - 1)]:  # it waits for a mirror
      resume = max(resume, at) + faults.join
  return moments, done


def _draw(run, flags, batch):
  """Draws images/s over the time of a run that loses two processes and gets one back."""
  steps, events = [], []
  changes = [
    ('a process is lost', run.lose, 1),
    ('process 0 is lost', run.lose, 0),
    ('a process comes', run.join, 1),
    ('', None, 0),
  ]
  for what, change, index in changes:
    steps += run.watch(time.monotonic() + _WATCHED)
    if change:
      change(index)
      events.append((time.monotonic() - steps[0][0], what))
  before, after = np.array(steps[:-_SMOOTHED]), np.array(steps[_SMOOTHED:])
  seconds, counts = (after - before).T
  rates = batch * np.maximum(counts, 0) / seconds
  with drawing.figure(flags.figure, 7, 2.4, dpi=110) as canvas:
    axes = canvas.subplots()
    axes.plot((before + after)[:, 0] / 2 - steps[0][0], rates, color=drawing.BLUE)
    for at, what in events:
      axes.axvline(at, color=drawing.SOFT, linestyle=':')
      axes.text(at + 0.5, 1.05 * max(rates), what, fontsize=8)
    axes.set(xlabel='seconds', ylabel='images/s', ylim=(0, 1.2 * max(rates)))


if __name__ == '__main__':
  main()
