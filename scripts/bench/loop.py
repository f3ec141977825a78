"""The loop's own cost: the loop around an identity step, less that step.

  python scripts/bench/loop.py

The step passes the state of ResNet-50 through, donated as in training. What
the loop adds is the difference between a run's time a step and that of the
same calls without a loop around them.
"""

import tempfile
import time
from unittest import mock

import _common
import jax
import numpy as np

from anp_jax import train
from anp_jax.config import command_line
from anp_jax.data.input import stream as stream_lib
from anp_jax.parallel import state as state_lib
from anp_jax.reporting import summary, telemetry
from anp_jax.training import train_step as step_lib

_STEPS = 1000
_ROUNDS = 5


class _OneBatch:
  """An endless stream of the same batch, as input that never makes one wait."""

  waited = 0.0

  def __init__(self, batch):
    self._batch = batch

  def __next__(self):
    return self._batch

  def close(self):
    pass


def _config():
  return command_line.load(
    'configs/resnet_anp.py',
    {
      'data.source': 'synthetic',
      'data.image_size': '32',
      'data.resize': '32',
      'duration': f'{_STEPS} steps',
      'schedule.warmup': '0 steps',
      'eval.every': '1000000 steps',
      'checkpoint.every': '1000000 steps',
      'checkpoint.keep_best': '0',
    },
  )


def main():
  """Times the loop around a step that does nothing."""
  config = _config()
  captured = {}

  def identity_step(train_step):
    names = step_lib.metric_names(train_step.objective)
    values = np.ones(len(names), np.float32)
    values[names.index('vote')] = 0
    step = jax.jit(
      lambda state, batch: (
        state.replace(step=state.step + 1),
        jax.numpy.asarray(values) + 0 * batch['weight'][0],
      ),
      donate_argnums=0,
    )
    captured['step'] = step
    return step

  real = stream_lib.Stream.train

  def one_batch(self, *arguments):
    feed = real(self, *arguments)
    captured['batch'] = next(feed)
    feed.close()
    return _OneBatch(captured['batch'])

  def keep_state(init, abstract_state, weights, create=state_lib.create):
    captured['state'] = create(init, abstract_state, weights)
    # The loop donates its own; this one is for the calls without a loop.
    return jax.tree.map(lambda x: x.copy(), captured['state'])

  loop, alone = [], []
  for _ in range(_ROUNDS):
    with (
      tempfile.TemporaryDirectory() as folder,
      mock.patch.object(step_lib.TrainStep, 'jitted', identity_step),
      mock.patch.object(stream_lib.Stream, 'train', one_batch),
      mock.patch.object(state_lib, 'create', keep_state),
      mock.patch.object(summary, 'report', lambda *a: None),
    ):
      train.run(config, folder)
      lines = [r for r in telemetry.read(folder) if r['kind'] == 'train'][1:]
    loop.append(sum(r['seconds'] for r in lines) / (_STEPS - 1))
    state, batch, step = captured['state'], captured['batch'], captured['step']
    state, values = step(state, batch)
    start = time.perf_counter()
    for _ in range(_STEPS):
      state, values = step(state, batch)
    jax.block_until_ready((state, values))
    alone.append((time.perf_counter() - start) / _STEPS)
  _show(loop, alone)


def _show(loop, alone):
  """Prints the table and the ratios of seconds a step."""
  cost = _common.median([a - b for a, b in zip(loop, alone)])
  rows = [
    ('a step', 'median ms', 'max ms'),
    *(
      (name, f'{1e3 * _common.median(t):.3f}', f'{1e3 * max(t):.3f}')
      for name, t in (('in the loop', loop), ('without a loop', alone))
    ),
    ("the loop's own", f'{1e3 * cost:.3f}', ''),
  ]
  _common.show(
    'identity step on the state of ResNet-50',
    rows,
    {
      'loop_over_step': _common.median(loop) / _common.median(alone),
      'loop_cost_over_1_ms': cost / 1e-3,
    },
  )


if __name__ == '__main__':
  main()
