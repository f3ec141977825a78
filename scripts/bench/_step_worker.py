"""The side of `step.py` that computes: a process that holds one contestant."""

import collections
from collections.abc import Callable
import dataclasses
import functools
import glob
import os

from anp_jax.system import memory, stopwatch
from scripts.bench import _cases, _contest, _peers, _torch_peers


def work(contestant: str, case: _cases.Case, cache: str, on: str):
  """Makes a contestant's step; answers each question with one line.

  Args:
    contestant: 'ours' or a peer, as `step.py` names them.
    case: what is trained.
    cache: folder of the persistent compilation cache.
    on: platform.
  """
  questions, answer = _contest.questions()
  make = _maker(contestant, cache, on)
  before = memory.of_process()
  candidate = make(case)
  first = stopwatch.timed(lambda: candidate.run(1))
  candidate.run(1)
  step = min(stopwatch.timed(lambda: candidate.run(1)) for _ in range(2))
  peak_memory = memory.of_process('VmHWM')
  memory.reset_peak()
  answer(first=first, step=step, device=candidate.device, library=candidate.library)
  for question in questions:
    if question['what'] == 'steps':
      answer(seconds=stopwatch.timed(functools.partial(candidate.run, question['steps'])))
    elif question['what'] == 'memory':
      now = memory.of_process('VmHWM')
      if on == 'cpu':
        most = max(peak_memory, now)
        answer(memory=most - before, stepping_memory=now - before)
      else:
        answer(memory=candidate.device_memory())
    else:
      answer(operations=profile(functools.partial(candidate.run, 3), question['to']))


def _maker(contestant, cache, on) -> Callable:
  """Imports a contestant's library; returns what makes its step."""
  if contestant.startswith('torch'):
    import torch  # noqa: F401

    return lambda case: _torch_peers.step(case, contestant == 'torch_compile', on != 'cpu')
  import flax.linen  # noqa: F401
  import jax
  import optax  # noqa: F401

  jax.devices()
  if contestant == 'flax':
    return _peers.flax_step
  make = _peers.our_maker(cache, 'xla' if contestant == 'xla' else 'auto')
  changes = {'float32': {'dtype': 'float32'}, 'strong_crop': {'augment': 'strong_crop'}}
  return lambda case: make(dataclasses.replace(case, **changes.get(contestant, {})))


def profile(run: Callable, folder: str) -> list[tuple[str, float]]:
  """Records a trace; returns the ten operations that took longest, with their shares."""
  import jax

  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # its hook fails while a run starts threads
  with jax.profiler.trace(folder, profiler_options=options):
    run()
  files = glob.glob(os.path.join(folder, '**', '*.xplane.pb'), recursive=True)
  data = jax.profiler.ProfileData.from_file(max(files, key=os.path.getmtime))
  totals = collections.Counter()
  for event in operations(data):
    totals[event.name] += event.duration_ns
  return [(n, t / totals.total()) for n, t in totals.most_common(10)]


def operations(data):
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
