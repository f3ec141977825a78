"""Times the training step, and the same in stock Flax and PyTorch.

  python -m scripts.bench.step [--cases=resnet50_64,lenet] [--rounds=8]

Forward, loss, backward, SGD with momentum and weight decay, update: of ours
exactly what training runs, metrics and all, with what main.py sets and, on a
CPU, with oneDNN where it is found. Everyone has a synthetic uint8 batch on the
device. Each contestant is a process of its own, which sleeps while the others take
their turns of half a second and five steps at least, in an order by chance. A ratio
is of one round; the table has the median of the rounds, the lowest and the quartiles, and
last the ratio of the fastest turns, which other work on the machine disturbs
least.

  xla            ours with model.cpu_library='xla': XLA alone, on a CPU
  float32        ours in float32, of a case in bfloat16 on a CPU
  strong_crop    ours with RandAugment and random erasing; only where it is named
  flax           flax.linen's layers, a plain jit, the state donated
  torch_eager    PyTorch, channels last, bfloat16 by autocast, fused SGD
  torch_compile  the same through torch.compile, which compiles for 40 s
  torch          whichever of the two was the faster

Memory is the most that a process held less what it held before it made network
and step, stepping memory the most once it has compiled; on a GPU, the most that
the library held there. Compiling is the first step's time less another's; what
it took over one step is how many steps it costs, its result not being in the
cache.

On a GPU the cases are those of 256 images in bfloat16, and images/s and MFU are
printed too. --batch and --side change the images of all cases. --profile=DIR
records a trace of ours there, and prints its top operations.
"""

import argparse
import dataclasses
import functools
import math
import os
import sys
import tempfile

from anp_jax.system import device_peaks, xla_flags
from scripts.bench import _cases, _common, _contest, _step_worker

_PEERS = ('xla', 'float32', 'flax', 'torch_eager', 'torch_compile')
_CPU_ONLY = ('xla', 'float32')
_OURS = ('ours', 'strong_crop', *_CPU_ONLY)
_MEMORY_GOALS = {'memory': 1.2, 'stepping_memory': 1.15}  # over PyTorch's, at most
_SIZES = ('batch', 'side')
# A contestant has slept, so its first step is slower: it is one of five at least.
_TURN_SECONDS, _TURN_STEPS = 0.5, 5
# Multiplications and additions of ResNet-50's forward pass at 224 px; a step
# is three of them, the backward pass being twice the forward.
_RESNET50_FLOPS = 2 * 4.09e9


@dataclasses.dataclass
class _Report:
  """The table of a run, and the ratios of its last line."""

  rows: list = dataclasses.field(default_factory=lambda: [('training step', *_contest.HEADING)])
  ratios: dict = dataclasses.field(default_factory=dict)


def main():
  """Runs the cases, each with its contestants in turn."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--cases', default='', help=', '.join(_cases.CASES))
  parser.add_argument('--peers', default=','.join(_PEERS))
  parser.add_argument('--rounds', type=int, default=8)
  parser.add_argument('--steps', type=int, default=0, help='steps per round; 0: ~0.5 s, 5 at least')
  for name in _SIZES:
    parser.add_argument(f'--{name}', type=int, default=0, help="0: the case's own")
  parser.add_argument('--profile', default='', metavar='DIR')
  parser.add_argument('--worker', nargs=4, help=argparse.SUPPRESS)
  flags = parser.parse_args()
  # Of this process and, by the same flags, of its workers.
  sizes = {name: getattr(flags, name) for name in _SIZES if getattr(flags, name)}
  for name, case in _cases.CASES.items():
    _cases.CASES[name] = dataclasses.replace(case, **sizes)
  if flags.worker:
    contestant, case, cache, on = flags.worker
    _step_worker.work(contestant, _cases.CASES[case], cache, on)
    return
  platform = xla_flags.platform()
  on_gpu = platform != 'cpu'
  default = [c for c in _cases.CASES if c != 'tiny' and c.endswith('_gpu') == on_gpu]
  cases = _chosen('--cases', flags.cases, _cases.CASES) or default
  peers = _chosen('--peers', flags.peers, ('strong_crop', *_PEERS))
  if on_gpu:
    peers = [p for p in peers if p not in _CPU_ONLY]
  report = _Report()
  with tempfile.TemporaryDirectory() as cache:
    for name in cases:
      arguments = (name, cache, platform, *(f'--{key}={n}' for key, n in sizes.items()))
      start = functools.partial(_start, arguments=arguments)
      # The first network finds an empty compilation cache.
      large = on_gpu or _cases.CASES[name].model == 'resnet50'
      compiles = large and not os.listdir(cache)
      _measure(name, peers, flags, start, report, compiles)
      if flags.profile:
        _show_profile(name, flags.profile, start)
  _common.show('ours over its peers', report.rows, report.ratios)


def _start(contestant, arguments, **extra):
  environment = _contest.environment(contestant in _OURS, extra)
  worker = _contest.Worker('step', (contestant, *arguments), environment)
  first, step = worker.ready['first'], worker.ready['step']
  # All that is left of a run that is ended before its table.
  print(
    f'{arguments[0]}: {contestant}: {first:.1f} s to the first step, {step:.4f} s a step',
    flush=True,
  )
  return worker


def _chosen(flag, text, valid_names):
  names = [n for n in text.split(',') if n]
  for name in names:
    if name not in valid_names:
      sys.exit(f'{flag}={name}: expected some of {", ".join(valid_names)}')
  return names


def _measure(name, peers, flags, start, report, compiles):
  """One case: starts, rounds, memory, and its lines of the table."""
  workers = {}
  try:
    workers['ours'] = start('ours')
    library = workers['ours'].ready['library']
    if library:
      print(f'{name}: ours computes with {library}', flush=True)
    if compiles:
      again = start('ours')
      again.close()
      _compiling_by_cache(workers['ours'].ready, again.ready, report)
    for peer in peers:
      if peer == 'float32' and _cases.CASES[name].dtype == 'float32':
        continue
      if peer == 'xla' and not library:
        print(f'skipped: {name}: xla: ours computes with XLA alone')
        continue
      try:
        workers[peer] = start(peer)
      except _contest.PeerLostError as e:
        print(f'skipped: {name}: {peer}: {e}')
    seconds = _rounds(workers, flags)
    reply = {c: w.ask(what='memory') for c, w in workers.items()}
  finally:
    for worker in workers.values():
      worker.close()
  _speeds(name, seconds, report)
  _memories(name, seconds, reply, report)
  _compiling(name, workers, report)
  device = workers['ours'].ready['device']
  if device != 'cpu':
    _absolutes(name, device, seconds, report)


def _compiling(name, workers, report):
  for contestant, worker in workers.items():
    report.ratios[f'{name}_{contestant}_first_step_seconds'] = worker.ready['first']
  ready = workers['ours'].ready
  ratio = (ready['first'] - ready['step']) / ready['step']
  report.ratios[f'{name}_compile_over_step'] = ratio
  label = f'{name}: compiling, over one step'
  report.rows.append((label, f'{ratio:.0f}', *[''] * 5))


def _compiling_by_cache(cold, cached, report):
  for key, ready, goal in (('cold', cold, 15), ('cached', cached, 3)):
    ratio = (ready['first'] - ready['step']) / goal
    report.ratios[f'compile_{key}_over_{goal}_s'] = ratio
    label = f'compiling, {key}, over {goal} s'
    report.rows.append(_contest.row(label, ratio, -1))


def _rounds(workers, flags) -> dict[str, list[float]]:
  """Seconds a step of each contestant in each round."""

  def question(contestant):
    steps = math.ceil(_TURN_SECONDS / workers[contestant].ready['step'])
    return {'what': 'steps', 'steps': flags.steps or min(max(steps, _TURN_STEPS), 2000)}

  return _contest.times(workers, flags.rounds, question)


def _speeds(name, seconds, report):
  rows, ratios = _contest.speeds(name, seconds, _cases.CASES[name].goals)
  report.rows += rows
  report.ratios.update({f'{name}_{key}': value for key, value in ratios.items()})


def _memories(name, seconds, reply, report):
  peer = _contest.faster_torch(seconds)
  for key, goal in _MEMORY_GOALS.items():
    if peer and reply[peer].get(key, 0) > 0:
      ratio = reply['ours'][key] / reply[peer][key]
      report.ratios[f'{name}_{key}_over_torch'] = ratio
      label = f'{name}: {key.replace("_", " ")} over {peer}'
      report.rows.append(_contest.row(label, ratio, -goal))


def _absolutes(name, device, seconds, report):
  """Images a second, and the share of the peak that is dense arithmetic."""
  case = _cases.CASES[name]
  for contestant, times in seconds.items():
    label = f'{name}: {contestant}, images/s, {device}'
    row, rate = _contest.images_per_second(label, case.batch, times)
    report.ratios[f'{name}_{contestant}_images_per_second'] = rate
    report.rows.append(row)
    share = mfu(case, rate, device)
    if share:
      report.ratios[f'{name}_{contestant}_mfu'] = share
      report.rows.append((f'{name}: {contestant}, MFU', f'{share:.3f}', *[''] * 5))


def mfu(case: _cases.Case, rate: float, device: str) -> float:
  """Share of the device's dense peak at `rate` images/s, 0 if not known."""
  peak = device_peaks.peak_flops(device, case.dtype)
  if case.model != 'resnet50' or not peak:
    return 0.0
  # The layers' work grows with the pixels; the classifier's is nothing.
  return 3 * _RESNET50_FLOPS * (case.side / 224) ** 2 * rate / peak


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


if __name__ == '__main__':
  main()
