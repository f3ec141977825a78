"""What compiling blocks of equal shape once saves, and what a step pays for it.

  python -m scripts.bench.once.equal_blocks [--target=cpu:1]

Gradients of the five equal blocks of ResNet-50's third stage by XLA alone, in processor time: a
scan of stacked weights, over blocks in a row with weights of their own, as networks have them.
Another target, such as gpu:h200:1x1, is compiled for alone.
"""

import argparse
import statistics
import time

from anp_jax.tools.portability import targets
from scripts.bench import _cases, _common

_BLOCKS, _ROUNDS = 5, 4  # the first round is for what a process does once


def _seconds(call):
  """A call's result, and its seconds of processor time."""
  before = time.process_time()
  return call(), time.process_time() - before


def _measured(is_scan, target):
  """Instructions, seconds of compiling and, on a CPU, of a step."""
  import jax
  import jax.numpy as jnp

  from anp_jax.models import layers, resnet

  dtype, batch = (jnp.float32, 8) if target.platform == 'cpu' else (jnp.bfloat16, 256)
  here = dict(platform=target.platform, parent=None)
  makers = layers.makers(layers.NormalisedNetwork(0, group=0, dtype=dtype, **here))
  block = resnet.Block(256, *makers, True, **here)

  def one(images, variables):
    return block.apply(variables, images, True, mutable=['batch_stats'])

  def loss(images, variables):
    if is_scan:
      images, _ = jax.lax.scan(one, images, variables)
    else:
      for each in variables:
        images, _ = one(images, each)
    return jnp.square(images.astype(jnp.float32)).mean()

  images = jax.ShapeDtypeStruct((batch, 14, 14, 1024), dtype)
  variables = jax.eval_shape(lambda x: block.init(jax.random.key(0), x, True), images)
  stacked = jax.tree.map(lambda s: s.update(shape=(_BLOCKS, *s.shape)), variables)
  variables = stacked if is_scan else [variables] * _BLOCKS
  place = jax.sharding.SingleDeviceSharding(targets.devices(target)[0])
  shapes = jax.tree.map(lambda s: s.update(sharding=place), (images, variables))
  compiled, compiling = _seconds(jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile)
  counts = compiled.as_text().count(' = '), compiling
  if target.platform != 'cpu':
    return counts
  arrays = jax.tree.map(lambda s: jnp.full(s.shape, 0.02, s.dtype), shapes)
  steps = [_seconds(lambda: jax.block_until_ready(compiled(*arrays)))[1] for _ in range(6)]
  return *counts, statistics.median(steps[1:])


def main():
  """Prints the ratios of each round, and their medians."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--target', type=targets.parse, default='cpu:1')
  target = parser.parse_args().target
  targets.prepare(target, _cases.config(_cases.CASES['resnet50_224']))
  rounds = [(_measured(True, target), _measured(False, target)) for _ in range(_ROUNDS)][1:]
  ratios = [[a / b for a, b in zip(*pair)] for pair in rounds]
  names = ('instructions', 'compiling', 'a step')[: len(ratios[0])]
  rows = [('scan over blocks in a row', *names)]
  rows += [(i, *(f'{x:.2f}' for x in row)) for i, row in enumerate(ratios, 1)]
  _common.show(target.text, rows, dict(zip(names, map(statistics.median, zip(*ratios)))))


if __name__ == '__main__':
  main()
