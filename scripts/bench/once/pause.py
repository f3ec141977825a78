"""Whether a training step after a pause takes longer than one that follows another.

  python -m scripts.bench.once.pause [--case=resnet50_64]

Ratios are of medians, to steps in a row; processor time counts the work alone, on a machine
that others use, too. The process restarts as training does.
"""

import argparse
import statistics
import time

from anp_jax.system import xla_flags
from scripts.bench import _cases, _common, _peers


def _step(run):
  """Seconds and processor seconds of one step."""
  before = time.perf_counter(), time.process_time()
  run(1)
  return time.perf_counter() - before[0], time.process_time() - before[1]


def main():
  """Times steps after pauses, and steps in a row."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--case', default='resnet50_64', choices=_cases.CASES)
  case = parser.parse_args().case
  xla_flags.enable()
  run = _peers.our_maker('')(_cases.CASES[case]).run
  run(4)
  after = {0.0: [], 0.02: [], 2.0: []}
  for _ in range(8):
    for pause, times in after.items():
      run(2)
      time.sleep(pause)
      times.append(_step(run))
  (wall, work), *paused = ([statistics.median(t) for t in zip(*times)] for times in after.values())
  rows, ratios = [('a step after', 'over one in a row', 'in processor time')], {}
  for pause, (seconds, busy) in zip((0.02, 2.0), paused, strict=True):
    rows.append((f'{pause} s', f'{seconds / wall:.2f}', f'{busy / work:.2f}'))
    ratios |= {f'{pause}_s': seconds / wall, f'{pause}_s_processor': busy / work}
  _common.show(case, rows, ratios)


if __name__ == '__main__':
  xla_flags.use_huge_pages()
  main()
