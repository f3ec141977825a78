"""Times the training step, and the same in stock Flax and PyTorch.

  python scripts/bench/step.py [--cases=resnet50_64,lenet] [--rounds=5]

Forward, loss, backward, SGD with momentum and weight decay, update: of ours
exactly what training runs, metrics and all, with what main.py sets. Everyone
has a synthetic uint8 batch on the device. Each contestant is a process of its
own, which sleeps while the others take their turn; a ratio is of one round, and
the table's its median.

  flax           flax.linen's layers, a plain jit, the state donated
  torch_eager    PyTorch, channels last, bfloat16 by autocast, fused SGD
  torch_compile  the same through torch.compile (on a CPU it compiles for 40 s)
  torch          whichever of the two was the faster

Memory is the most that a process held less what it held before it made network
and step, stepping memory the most once it has compiled; on a GPU, the most that
the library held there. Compiling is the first step's time less another's.

On a GPU the case is resnet50_gpu, and images/s and MFU are printed too.
--profile=DIR records a trace of ours there, and prints its top operations.
"""

import argparse
import collections
from collections.abc import Callable
import contextlib
import dataclasses
import functools
import glob
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time

import _common
import _peers

from anp_jax.system import device_peaks
from anp_jax.system import xla_flags

_PEERS = ('flax', 'torch_eager', 'torch_compile')
_TORCH_GOAL, _MEMORY_GOAL = 1.0, 1.2
# Multiplications and additions of ResNet-50's forward pass at 224 px; a step
# is three of them, the backward pass being twice the forward.
_RESNET50_FLOPS = 2 * 4.09e9


@dataclasses.dataclass(frozen=True)
class Case:
  """What is trained.

  Attributes:
    model: as config.model.name.
    side: pixels a side of the images.
    batch: images a step.
    flax_goal: how many times as fast as stock Flax ours is to be; 0: no goal.
  """

  model: str
  side: int
  batch: int
  dtype: str = 'float32'
  channels: int = 3
  classes: int = 1000
  flax_goal: float = 0.0


CASES = {
  'resnet50_64': Case('resnet50', 64, 32, flax_goal=3.5),
  'resnet50_224': Case('resnet50', 224, 8, flax_goal=3.0),
  'resnet50_224_bfloat16': Case('resnet50', 224, 8, 'bfloat16', flax_goal=3.0),
  'lenet': Case('lenet', 28, 64, channels=1, classes=10),
  'cifar10_full': Case('cifar10_full', 32, 100, classes=10),
  'resnet50_gpu': Case('resnet50', 224, 256, 'bfloat16'),
  'tiny': Case('lenet', 16, 4, classes=10),  # for tests
}
_ENVIRONMENT = {
  # Several workers share a GPU, and none may take all of its memory.
  'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
  # An error's last line is to be its own.
  'JAX_TRACEBACK_FILTERING': 'off',
}


@dataclasses.dataclass
class _Report:
  """The table of a run, and the ratios of its last line."""

  rows: list = dataclasses.field(
    default_factory=lambda: [('training step', 'ours', 'lowest', 'goal', '')]
  )
  ratios: dict = dataclasses.field(default_factory=dict)


def main():
  """Runs the cases, each with its contestants in turn."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--cases', default='', help=', '.join(CASES))
  parser.add_argument('--peers', default=','.join(_PEERS))
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--steps', type=int, default=0, help='a turn; 0: ~1 s')
  parser.add_argument('--profile', default='', metavar='DIR')
  parser.add_argument('--worker', nargs=4, help=argparse.SUPPRESS)
  flags = parser.parse_args()
  if flags.worker:
    _work(*flags.worker)
    return
  platform = _platform()
  on_gpu = platform != 'cpu'
  default = [c for c in CASES if c.endswith('_gpu') == on_gpu and c != 'tiny']
  cases = _chosen('--cases', flags.cases, CASES) or default
  peers = _chosen('--peers', flags.peers, _PEERS)
  if importlib.util.find_spec('torch') is None:
    print('skipped: no PyTorch here')
    peers = [p for p in peers if not p.startswith('torch')]
  report = _Report()
  with tempfile.TemporaryDirectory() as cache:
    for name in cases:
      start = functools.partial(_Worker, case=name, cache=cache, on=platform)
      # The first ResNet finds an empty compilation cache.
      compiles = CASES[name].model == 'resnet50' and not os.listdir(cache)
      _measure(name, peers, flags, start, report, compiles)
      if flags.profile:
        _show_profile(name, flags.profile, start)
  _common.show('ours over its peers', report.rows, report.ratios)


def _chosen(flag, text, valid_names):
  names = [n for n in text.split(',') if n]
  for name in names:
    if name not in valid_names:
      sys.exit(f'{flag}={name}: expected some of {", ".join(valid_names)}')
  return names


def _platform() -> str:
  """What JAX computes on; asked in a process that does not stay on it."""
  code = 'import jax; print(jax.default_backend())'
  reply = subprocess.check_output([sys.executable, '-c', code], text=True)
  return reply.strip()


def _measure(name, peers, flags, start, report, compiles):
  """One case: starts, rounds, memory, and its lines of the table."""
  workers = {}
  try:
    workers['ours'] = start('ours')
    if compiles:
      again = start('ours')
      again.close()
      _compiling(workers['ours'].ready, again.ready, report)
    for peer in peers:
      try:
        workers[peer] = start(peer)
      except Lost as e:
        print(f'skipped: {name}: {peer}: {e}')
    seconds = _rounds(workers, flags)
    reply = {c: w.ask(what='memory') for c, w in workers.items()}
  finally:
    for worker in workers.values():
      worker.close()
  _speeds(name, seconds, report)
  _memories(name, seconds, reply, report)
  device = workers['ours'].ready['device']
  if device != 'cpu':
    _absolutes(name, device, seconds, report)


def _compiling(cold, cached, report):
  for key, ready, goal in (('cold', cold, 15), ('cached', cached, 3)):
    ratio = (ready['first'] - ready['step']) / goal
    report.ratios[f'compile_{key}_over_{goal}_s'] = ratio
    _row(report.rows, f'compiling, {key}, over {goal} s', ratio, -1)


def _rounds(workers, flags) -> dict[str, list[float]]:
  """Seconds a step of each contestant in each round."""
  seconds = {contestant: [] for contestant in workers}
  for i in range(flags.rounds):
    # Every other round backwards: no one is always first after another.
    for contestant in list(workers)[:: -1 if i % 2 else 1]:
      worker = workers[contestant]
      steps = flags.steps or min(
        max(2, math.ceil(1 / worker.ready['step'])), 2000
      )
      reply = worker.ask(what='steps', steps=steps)
      seconds[contestant].append(reply['seconds'] / steps)
  return seconds


def _faster_torch(seconds):
  peers = [c for c in seconds if c.startswith('torch')]
  return min(peers, key=lambda c: _common.median(seconds[c]), default='')


def _speeds(name, seconds, report):
  faster = _faster_torch(seconds)
  for contestant, other_seconds in seconds.items():
    if contestant == 'ours':
      continue
    over = [b / a for a, b in zip(seconds['ours'], other_seconds)]
    ratio = _common.median(over)
    report.ratios[f'{name}_over_{contestant}'] = ratio
    goal = CASES[name].flax_goal if contestant == 'flax' else 0
    label = f'{name}: times as fast as {contestant}'
    if contestant == faster:
      report.ratios[f'{name}_over_torch'] = ratio
      goal, label = _TORCH_GOAL, f'{label}, the faster torch'
    _row(report.rows, label, ratio, goal, lowest=min(over))


def _memories(name, seconds, reply, report):
  peer = _faster_torch(seconds)
  for key in ('memory', 'stepping_memory'):
    if peer and reply[peer].get(key, 0) > 0:
      ratio = reply['ours'][key] / reply[peer][key]
      report.ratios[f'{name}_{key}_over_torch'] = ratio
      label = key.replace('_', ' ')
      _row(report.rows, f'{name}: {label} over {peer}', ratio, -_MEMORY_GOAL)


def _absolutes(name, device, seconds, report):
  """Images a second, and the share of the peak that is dense arithmetic."""
  case = CASES[name]
  for contestant, times in seconds.items():
    rate, lowest = (case.batch / f(times) for f in (_common.median, max))
    report.ratios[f'{name}_{contestant}_images_per_second'] = rate
    label = f'{name}: {contestant}, images/s, {device}'
    report.rows.append((label, f'{rate:.0f}', f'{lowest:.0f}', '', ''))
    share = mfu(case, rate, device)
    if share:
      report.ratios[f'{name}_{contestant}_mfu'] = share
      report.rows.append(
        (f'{name}: {contestant}, MFU', f'{share:.3f}', '', '', '')
      )


def mfu(case: Case, rate: float, device: str) -> float:
  """Share of the device's dense peak at `rate` images/s, 0 if not known."""
  peak = device_peaks.peak_flops(device, case.dtype)
  if case.model != 'resnet50' or not peak:
    return 0.0
  # The layers' work grows with the pixels; the classifier's is nothing.
  return 3 * _RESNET50_FLOPS * (case.side / 224) ** 2 * rate / peak


def _row(rows, label, ratio, goal, lowest=None):
  """One line of the table; a negative goal is one not to exceed."""
  good = ratio >= goal if goal > 0 else ratio <= -goal
  rows.append((
    label,
    f'{ratio:.2f}',
    '' if lowest is None else f'{lowest:.2f}',
    f'{">=" if goal > 0 else "<="} {abs(goal)}' if goal else '',
    ('met' if good else 'missed') if goal else '',
  ))  # fmt: skip


def _show_profile(name, folder, start):
  # A profile cannot name the kernels of a CUDA graph.
  flags = os.environ.get('XLA_FLAGS', '') + ' --xla_gpu_enable_command_buffer='
  worker = start('ours', XLA_FLAGS=flags)
  try:
    reply = worker.ask(what='profile', to=folder)
  finally:
    worker.close()
  print(f'{name}: top operations of ours, share of all ({folder})')
  for operation, share in reply['operations']:
    print(f'  {100 * share:5.1f}%  {operation}')


class Lost(RuntimeError):
  """A worker ended without an answer."""


class _Worker:
  """A process that holds one contestant, asleep until it is asked."""

  def __init__(self, contestant, case, cache, on, **extra):
    self._errors = tempfile.TemporaryFile('w+')
    self._process = subprocess.Popen(
      [sys.executable, os.path.abspath(__file__)]
      + ['--worker', contestant, case, cache, on],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
      text=True,
      env=_environment(contestant, extra),
    )  # fmt: skip
    try:
      self.ready = self._answer()
    except BaseException:
      self.close()
      raise

  def ask(self, **question) -> dict:
    with contextlib.suppress(BrokenPipeError):  # the answer says why
      self._process.stdin.write(json.dumps(question) + '\n')
      self._process.stdin.flush()
    return self._answer()

  def close(self):
    self._process.kill()
    self._process.communicate()
    self._errors.close()

  def _answer(self):
    line = self._process.stdout.readline()
    if not line:
      self._errors.seek(0)
      lines = [x for x in self._errors.read().splitlines() if x.strip()]
      raise Lost(lines[-1] if lines else 'it ended without a word')
    return json.loads(line)


def _environment(contestant, extra) -> dict[str, str]:
  """Variables of a worker: main.py's settings of XLA are ours alone."""
  environment = os.environ | _ENVIRONMENT | extra
  # The allocator's are everyone's, for they make PyTorch quicker too.
  xla_flags.use_huge_pages(environment, restart=lambda *_: None)
  if contestant == 'ours':
    xla_flags.enable(environment)
  return environment


def _work(contestant, case, cache, on):
  """A worker: answers each line of its input with one line."""
  # What libraries print must not get between the answers.
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)

  def answer(**values):
    print(json.dumps(values), file=answers, flush=True)

  make = _maker(contestant, cache, on)
  before = _memory('VmRSS')
  candidate = make(CASES[case])
  first = _seconds(candidate, 1)
  candidate.run(1)
  step = min(_seconds(candidate, 1) for _ in range(2))
  peak_memory = _memory('VmHWM')
  with open('/proc/self/clear_refs', 'w') as f:
    f.write('5')  # forgets VmHWM
  answer(first=first, step=step, device=candidate.device)
  for line in sys.stdin:
    question = json.loads(line)
    if question['what'] == 'steps':
      answer(seconds=_seconds(candidate, question['steps']))
    elif question['what'] == 'memory':
      now = _memory('VmHWM')
      if on == 'cpu':
        most = max(peak_memory, now)
        answer(memory=most - before, stepping_memory=now - before)
      else:
        answer(memory=candidate.device_memory())
    else:
      answer(operations=_profile(candidate, question['to']))


def _maker(contestant, cache, on) -> Callable:
  """Imports a contestant's library; returns what makes its step."""
  if contestant.startswith('torch'):
    import torch  # noqa: F401

    choices = (contestant == 'torch_compile', on != 'cpu')
    return lambda case: _peers.torch_step(case, *choices)
  import flax.linen  # noqa: F401
  import jax
  import optax  # noqa: F401

  jax.devices()
  if contestant == 'flax':
    return _peers.flax_step
  return _peers.our_maker(cache)


def _seconds(candidate, steps):
  start = time.perf_counter()
  candidate.run(steps)
  return time.perf_counter() - start


def _memory(field) -> int:
  """Bytes of this process: VmRSS now, VmHWM the most there has been.

  Not getrusage: its maximum is inherited from the process that started this.
  """
  with open('/proc/self/status') as f:
    line = next(line for line in f if line.startswith(field + ':'))
  return int(line.split()[1]) * 1024


def _profile(candidate, folder):
  """Records a trace; the operations that took longest, with their shares."""
  import jax

  with jax.profiler.trace(folder):
    candidate.run(3)
  files = glob.glob(os.path.join(folder, '**', '*.xplane.pb'), recursive=True)
  data = jax.profiler.ProfileData.from_file(max(files, key=os.path.getmtime))
  totals = collections.Counter()
  for event in _operations(data):
    totals[event.name] += event.duration_ns
  return [(n, t / totals.total()) for n, t in totals.most_common(10)]


def _operations(data):
  """A trace's events that are one operation of a compiled program each.

  On a GPU they lie on the streams of the device's plane, on a CPU on the
  threads of the host's; other lines repeat them as modules and steps.
  """
  planes = list(data.planes)
  devices = [p for p in planes if p.name.startswith('/device:')]
  for plane in devices or planes:
    for line in plane.lines:
      for event in line.events:
        if any(key == 'hlo_op' for key, _ in event.stats):
          yield event


if __name__ == '__main__':
  main()
