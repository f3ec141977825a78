"""How large training steps become that are compiled for a GPU, over those of Flax's layers.

  .venv-portability/bin/python -m scripts.bench.once.hlo [--case=convnext_tiny_gpu]

The GPU need not be here; `make portability` makes the environment. All take XLA's settings
of main.py, and the contestants take turns in one process, in an order by chance:

  step    ours, as main.py runs it
  layers  our network in the plain step of _peers.py, which counts no metrics
  flax    the same network of Flax's own layers in that step

Instructions are those of all computations after XLA's passes; kernels are those that a fusion
or a library computes. Seconds are processor time: of a trace with JAX's caches empty, and then
of XLA. A ratio is of one round; the table has medians of the rounds, and ratios' quartiles.
"""

import argparse
import os
import re
import statistics

from anp_jax.tools.portability import targets
from scripts.bench import _cases, _common, _contest, _peers

_CONTESTANTS = ('step', 'layers', 'flax')
_COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.-]+) .*\{$', re.M)
_INSTRUCTION = re.compile(r'^ +(?:ROOT )?%?[\w.-]+ = (.*)$', re.M)
_KERNEL = re.compile(r' (?:fusion|custom-call)\(')
_FUSED = re.compile(r' fusion\(.*calls=%?([\w.-]+)')


def sizes(text: str) -> tuple[int, int]:
  """Instructions of a compiled program's text, and kernels outside of its fusions."""
  fused, instructions, kernels = set(_FUSED.findall(text)), 0, 0
  _, *parts = _COMPUTATION.split(text)
  for name, body in zip(parts[::2], parts[1::2], strict=True):
    values = _INSTRUCTION.findall(body)
    instructions += len(values)
    kernels += name not in fused and sum(bool(_KERNEL.search(value)) for value in values)
  return instructions, kernels


def _program(contestant, case, target):
  """A contestant's jitted step, new, and its abstract arguments on the target."""
  import jax
  import jax.numpy as jnp

  from anp_jax import experiment, models
  from anp_jax.training import build
  from scripts.bench import _flax_networks

  config, (device,) = _cases.config(case), targets.devices(target)
  if contestant == 'step':
    opened = experiment.open(config, [device])
    batch = build.abstract_batch(opened.config, opened.mesh, opened.spec.array_rows)
    return opened.program.train_step, opened.program.abstract_state, batch
  net = _flax_networks.network(case)
  if contestant == 'layers':
    net = models.create(config, case.classes, models.target(config, target.platform))
  create, step = _peers.plain_step(case, net)
  place = jax.sharding.SingleDeviceSharding(device)
  shapes = (
    jax.eval_shape(create),
    jax.ShapeDtypeStruct((case.batch, case.side, case.side, 3), jnp.uint8),
    jax.ShapeDtypeStruct((case.batch,), jnp.int32),
  )
  return step, *jax.tree.map(lambda s: s.update(sharding=place), shapes)


def _figures(contestant, case, target):
  """Sizes of one contestant's program, and processor seconds that it takes to make, by name."""
  import jax

  step, *shapes = _program(contestant, case, target)
  jax.clear_caches()
  times = [os.times()]
  lowered = step.lower(*shapes)
  times.append(os.times())
  compiled = lowered.compile()
  times.append(os.times())
  # User and system, also of processes that have ended.
  before, between, after = (sum(t[:4]) for t in times)
  instructions, kernels = sizes(compiled.as_text())
  seconds = {'trace_seconds': between - before, 'compile_seconds': after - between}
  return {'instructions': instructions, 'kernels': kernels, **seconds}


def main():
  """Compiles each case's contestants in turns, and compares them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--case', action='append', choices=_cases.CASES)
  parser.add_argument('--target', type=targets.parse, default='gpu:h200:1x1')
  parser.add_argument('--rounds', type=int, default=3)
  flags = parser.parse_args()
  cases = flags.case or ['efficientnet_b0_gpu', 'convnext_tiny_gpu']
  targets.prepare(flags.target, _cases.config(_cases.CASES[cases[0]]))
  ours = _CONTESTANTS[:-1]
  rows, ratios = [('', *_CONTESTANTS, *(f'{c} over flax' for c in ours))], {}
  for name in cases:
    figures = {contestant: [] for contestant in _CONTESTANTS}
    for order in _contest.rounds(_CONTESTANTS, flags.rounds):
      for contestant in order:
        figures[contestant].append(_figures(contestant, _cases.CASES[name], flags.target))
        print(f'{name}: {contestant}: {figures[contestant][-1]}', flush=True)
    for key in figures['flax'][0]:
      values = {c: [f[key] for f in figures[c]] for c in _CONTESTANTS}
      over = {c: _contest.over(values['flax'], values[c]) for c in ours}
      row = [f'{statistics.median(v):.6g}' for v in values.values()]
      for c, ratio in over.items():
        row.append(f'{ratio.median:.3f} ({ratio.quartiles[0]:.3f}-{ratio.quartiles[1]:.3f})')
        ratios[f'{name}_{c}_{key}_over_flax'] = ratio.median
      rows.append((f'{name}: {key.replace("_", " ")}', *row))
  _common.show(f'compiled for {flags.target.text}', rows, ratios)


if __name__ == '__main__':
  main()
