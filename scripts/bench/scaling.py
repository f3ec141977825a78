"""Weak scaling: two processes of one run against two runs of their own.

  python scripts/bench/scaling.py [--rounds=3] [--steps=8] [--batch=64]

Each process has a core to itself and the same images a step. In every round
take turns: one process alone on its core; two that know nothing of each other,
at the same time; and two of one run, which sum their gradients at each step
(gloo over loopback). What connecting costs is the second against the third;
what a second core gives is the first against the third.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile

import _common

from anp_jax import telemetry

_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), '..', '..'))


def _arguments(flags, workdir, processes):
  keys = {
    'model.name': flags.model,
    'data.source': 'synthetic',
    'data.image_size': 64,
    'data.resize': 64,
    'data.synthetic_examples': 256,  # both splits: one is scored at the end
    'batch_size': flags.batch * processes,
    'duration': f'{flags.steps + 3} steps',
    'schedule.warmup': '0 steps',
    'log.every': '1 steps',
    'log.tensorboard': False,
    'eval.every': '1000000 steps',
    'checkpoint.every': '1000000 steps',
  }
  return [
    '--config=configs/resnet_anp.py',
    f'--workdir={workdir}',
    *(f'--config.{key}={value}' for key, value in keys.items()),
  ]


def _start(core, arguments):
  return subprocess.Popen(
    ['taskset', '-c', str(core), sys.executable, 'main.py', *arguments],
    cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
  )  # fmt: skip


def _rate(workdir):
  """Images a second of a run, from the median of its steps but the first."""
  lines = [r for r in telemetry.read(workdir) if r['kind'] == 'train']
  rates = [r['images_per_second'] for r in lines[2:]]
  return statistics.median(rates)


def _wait(children):
  for child in children:
    _, error = child.communicate()
    if child.returncode:
      raise SystemExit(error[-2000:])


def _measure(flags, how):
  """Images a second of all processes together."""
  with tempfile.TemporaryDirectory() as folder:
    workdirs = [f'{folder}/{i}' for i in range(2 if how == 'apart' else 1)]
    if how == 'together':
      with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
      children = [
        _start(
          core,
          [f'--coordinator=127.0.0.1:{port}', '--num_processes=2',
           f'--process_id={core}', *_arguments(flags, workdirs[0], 2)],
        )
        for core in (0, 1)
      ]  # fmt: skip
    else:
      children = [
        _start(core, _arguments(flags, workdir, 1))
        for core, workdir in enumerate(workdirs)
      ]
    _wait(children)
    return sum(_rate(workdir) for workdir in workdirs)


def main():
  """Times the three in turn."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--steps', type=int, default=8)
  parser.add_argument('--batch', type=int, default=64, help='a process')
  parser.add_argument('--model', default='resnet50')
  flags = parser.parse_args()
  if len(os.sched_getaffinity(0)) < 2:
    raise SystemExit('error: needs two cores')
  found = {'alone': [], 'apart': [], 'together': []}
  for _ in range(flags.rounds):
    for how, rates in found.items():
      rates.append(_measure(flags, how))
  over = {
    how: [t / o for t, o in zip(found['together'], found[how])]
    for how in ('apart', 'alone')
  }
  rows = [('two processes of one run', 'ours', 'lowest', 'goal', '')]
  for how, label, goal in (
    ('apart', 'over two runs at the same time', 0.95),
    ('alone', 'over one process on one core', None),
  ):
    ratio = _common.median(over[how])
    rows.append(
      (label, f'{ratio:.3f}', f'{min(over[how]):.3f}',
       f'>= {goal}' if goal else '',
       ('met' if ratio >= goal else 'missed') if goal else '')
    )  # fmt: skip
  _common.show(
    f'weak scaling, {flags.model}, {flags.batch} x 64 px a process',
    rows,
    {f'together_over_{how}': _common.median(over[how]) for how in over},
  )


if __name__ == '__main__':
  main()
