"""Where a training step's time goes, by kind of layer and pass.

  python -m scripts.bench.layers [--size=224] [--batch=8] [--dtype=bfloat16]
    [--model=resnet18] [--width=64] [--config=configs/resnet_anp.py:tiny]
    [--steps=3] [--top=15] [--shares=1,2,4 [--rounds=3]]

The step is the real one, with what main.py sets, on one device and a synthetic
batch, run under JAX's profiler; `_trace` divides the wall time among the
program's instructions. Per kind of layer and pass:

  % step     of the wall time under the profiler, which the rows add up to
  GF/s       the mathematics' operations, whatever the lowering does, over time
  GB/s       operands and results of the instructions, each once, over time
  % of peak  of a large matrix product of the row's dtype; of a large a + 3 b

With --shares=1,2,4,8 the table is another one: by how much each layer, forward
and backward, is faster with a part of the batch on one core, t(batch) over
t(batch / n). It is what a batch divided over n processes could give, before
anything is sent ("alone"); where this machine has n cores, n processes also
compute their parts at once. The update, for one, does not divide.

GF/s and GB/s take the row's share of a step's time without the profiler. A
fusion over several layers counts for the one whose matrix product it holds, or
else for the layer of its root. GB/s may exceed the peak where caches serve.

On a GPU the step is compiled without CUDA graphs, whose kernels a profile
cannot name.
"""

import argparse
import contextlib
import dataclasses
import functools
import math
import os
import tempfile
import time
from unittest import mock

# With -m the repository's root is on the path, as a file this folder is.
if __package__:
  from scripts.bench import _common, _places, _shares, _trace
else:
  import _common
  import _places
  import _shares
  import _trace
import jax
import jax.numpy as jnp

from anp_jax.config import command_line
from anp_jax.data import sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.models import layers
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from anp_jax.system import xla_flags
from anp_jax.tools.portability import compiled_program as program_lib
from anp_jax.training import build, mixing, objective as objective_lib, run_spec

IDLE = 'no instruction running'
_KINDS = (
  'norm',
  'max pool',
  'activation and add',
  'head',
  'loss',
  'input',
  'update',
  'other',
  IDLE,
)


def main():
  """Profiles a step and prints its table."""
  flags = _flags()
  if flags.shares:
    _show_shares(flags)
    return
  _set_flags()
  device = jax.devices()[0]
  config = _config(flags, flags.batch)
  model, run, compiled, layers_of = _step(config, device)
  first = _peaks(device.platform)
  plain = [run() for _ in range(2 + flags.steps)][2:]
  events, profiled = _profiled(run, flags.steps)
  plain += [run() for _ in range(flags.steps)]
  second = _peaks(device.platform)
  peaks = {key: max(first[key], second[key]) for key in first}
  step = _common.median(plain)

  program = program_lib.Program(compiled.as_text())
  spent, costs = _costs(program, (type(model).__name__, layers_of), events, profiled)
  _show_top(program, costs, step, flags.top)
  ratios = {
    'profiler_over_plain': _common.median(profiled) / step,
    'threads_at_work': spent.threads,
    'bfloat16_over_float32_peak': peaks['bfloat16'] / peaks['float32'],
  }
  rows = _rows(costs, _places.flops(layers_of), peaks, config, step, ratios)
  print(
    f'\npeaks: float32 {peaks["float32"] / 1e9:.0f} GF/s, bfloat16 '
    f'{peaks["bfloat16"] / 1e9:.0f} GF/s, memory {peaks["memory"] / 1e9:.1f} '
    f'GB/s; {spent.threads:.2f} threads at work on average\n'
    f'under the profiler a step takes {ratios["profiler_over_plain"]:.2f} '
    'times as long; instructions that overlap share the wall time\n'
  )
  title = (
    f'{config.model.name}, {config.model.dtype}, {config.batch_size} x '
    f'{config.data.image_size} px, {device.device_kind}'
  )
  if device.platform == 'gpu':
    title += f', {1e3 * step:.2f} ms a step'
  _common.show(title, rows, ratios)


def _set_flags():
  # Read when the backend starts. The kernels of a CUDA graph have no names.
  xla_flags.enable()
  os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + ' --xla_gpu_enable_command_buffer='


def _costs(program, network, events, profiled):
  """What each instruction takes.

  Args:
    program: `program_lib.Program`.
    network: the model's class, such as 'ResNet', and its layers.
    events: of the profile.
    profiled: seconds of each step in it.

  Returns:
    `_trace.Spent`, and a `_Cost` for each instruction.
  """
  spent = _trace.spent(events, program)
  if not spent.seconds:
    raise SystemExit('the profile names no instruction of the step')
  # What no instruction takes of the wall time is the host's.
  total = max(sum(profiled), sum(spent.seconds.values()))
  costs = []
  for name, seconds in spent.seconds.items():
    instruction = program.instructions[name]
    costs.append(
      _Cost(
        instruction,
        _places.layer_name(program, instruction, *network),
        _places.place(program, instruction, *network),
        seconds / total,
        spent.runs[name] / len(profiled) * program.traffic(instruction),
      )
    )
  return spent, costs


def _show_shares(flags):
  """Profiles the step with parts of the batch; prints the speed-ups."""
  cores = len(os.sched_getaffinity(0))
  work = functools.partial(_share_times, flags, flags.shares)
  (times,) = _shares.run_pinned(work, 1)
  times = {(_shares.ALONE, n): rows for n, rows in times.items()}
  for n in flags.shares:
    if 1 < n <= cores:
      work = functools.partial(_share_times, flags, (n,))
      by_process = _shares.run_pinned(work, n)
      times[_shares.AT_ONCE, n] = [r for rows in by_process for r in rows[n]]
  rows, ratios = _shares.table(times)
  title = f'{flags.model}, {flags.batch} x {flags.size} px, compute only'
  _common.show(title, rows, ratios)


def _share_times(flags, shares, index):
  """Seconds of each layer in each round, by number of shares, on one core."""
  _shares.pin(index)
  _set_flags()
  device = jax.devices()[0]
  steps = {n: _step(_config(flags, _shares.images(flags.batch, n)), device) for n in shares}
  for _, run, _, _ in steps.values():
    run()
    run()
  times = {n: [] for n in shares}
  for _ in range(flags.rounds):
    for n, (model, run, compiled, layers_of) in steps.items():
      _shares.meet()
      plain = [run() for _ in range(flags.steps)]
      events, profiled = _profiled(run, flags.steps)
      program = program_lib.Program(compiled.as_text())
      _, costs = _costs(program, (type(model).__name__, layers_of), events, profiled)
      seconds = dict.fromkeys((cost.layer for cost in costs), 0.0)
      for cost in costs:
        seconds[cost.layer] += cost.share * _common.median(plain)
      idle = max(0.0, 1 - sum(cost.share for cost in costs))
      times[n].append(seconds | {IDLE: idle * _common.median(plain)})
  return times


@dataclasses.dataclass(frozen=True)
class _Cost:
  """An instruction's share of a step, and its bytes in a step."""

  instruction: program_lib.Instruction
  layer: str
  where: tuple[str, str]
  share: float
  moved: float


def _flags():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--config', default='configs/resnet_anp.py')
  parser.add_argument('--size', type=int, default=224, help='pixels')
  parser.add_argument('--batch', type=int, default=8, help='images')
  parser.add_argument('--dtype', default='float32')
  parser.add_argument('--model', default='resnet50')
  parser.add_argument('--width', type=int, default=64, help='channels')
  parser.add_argument('--steps', type=int, default=3, help='in the profile')
  parser.add_argument('--top', type=int, default=15, help='instructions')
  parser.add_argument('--shares', type=_common.counts, default=())
  parser.add_argument('--rounds', type=int, default=3, help='with --shares')
  flags = parser.parse_args()
  if flags.shares and flags.shares[0] != 1:
    shares = ','.join(map(str, flags.shares))
    parser.error(f'--shares={shares}: expected 1, the whole batch, first')
  for name in ('steps', 'rounds'):
    if getattr(flags, name) < 1:
      parser.error(f'--{name}={getattr(flags, name)}: expected 1 or more')
  return flags


def _config(flags, batch):
  keys = {
    'batch_size': str(batch),
    'data.image_size': str(flags.size),
    'data.resize': str(flags.size),
    'data.source': 'synthetic',
    'duration': '1000 steps',
    'model.dtype': flags.dtype,
    'model.name': flags.model,
    'model.norm_group': str(math.gcd(32, batch)),
    'model.width': str(flags.width),
    'schedule.warmup': '0 steps',
  }
  # Some belong to one strategy, or to ResNets, alone.
  return command_line.load(flags.config, command_line.applying(flags.config, keys))


def _step(config, device):
  """The model, a function that times one step, the program, the layers."""
  mesh = mesh_lib.create(config, [device])
  source = sources.open_source(config, training=True)
  objective = objective_lib.create(source.vocabulary, config)
  parts = build.create(run_spec.RunSpec(config, mesh, objective, config.batch_size, len(source)))
  model, abstract_state = parts.model, parts.abstract_state
  feed = stream_lib.Stream(config, mesh_lib.batch_sharding(mesh)).train(
    source, config.batch_size, 0
  )
  batch = next(feed)
  feed.close()
  state = state_lib.create(parts.init_fn, abstract_state)
  # Or the cache answers with a program that has another's op_names.
  jax.config.update('jax_compilation_cache_include_metadata_in_key', True)
  with _scopes():
    compiled = parts.train_step.lower(state, batch).compile()
  images = batch['image']
  images = jax.ShapeDtypeStruct(images.shape, config.model.dtype)
  layer_shapes = _places.shapes(
    model, images, {'params': abstract_state.params, **abstract_state.stats}
  )

  def run():
    nonlocal state
    start = time.perf_counter()
    state, values = compiled(state, batch)
    jax.block_until_ready((state, values))
    return time.perf_counter() - start

  return model, run, compiled, layer_shapes


@contextlib.contextmanager
def _scopes():
  """Names what no module of its own computes."""
  with contextlib.ExitStack() as stack:
    for module, function, scope in (
      (layers, 'max_pool', 'max_pool'),
      (mixing, 'normalise', 'input'),
      (mixing, 'blend', 'input'),
    ):
      named = jax.named_scope(scope)(getattr(module, function))
      stack.enter_context(mock.patch.object(module, function, named))
    yield


def _profiled(run, steps):
  """Events and seconds of each step, under the profiler."""
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, profiler_options=options):
      took = [run() for _ in range(steps)]
    return _trace.read(folder), took


def _peaks(platform):
  """Operations and bytes a second of large products and a large a + 3 b."""
  side, length = (2048, 2**25) if platform == 'cpu' else (8192, 2**28)
  result = {}
  product = jax.jit(jnp.matmul)
  for dtype in ('float32', 'bfloat16'):
    square = jnp.ones((side, side), dtype)
    took = _quickest(functools.partial(product, square, square))
    result[dtype] = 2 * side**3 / took
  # In place: fresh memory would be measured by the kernel's page faults.
  add = jax.jit(lambda a, b: a + 3 * b, donate_argnums=0)
  a, b = jnp.ones(length), jnp.ones(length)

  def triad():
    nonlocal a
    a = add(a, b)
    return a

  result['memory'] = 3 * a.nbytes / _quickest(triad)
  return result


def _quickest(function, seconds=1.0):
  jax.block_until_ready(function())
  took, begin = [], time.perf_counter()
  while len(took) < 3 or time.perf_counter() - begin < seconds:
    start = time.perf_counter()
    jax.block_until_ready(function())
    took.append(time.perf_counter() - start)
  return min(took)


def _rows(costs, counts, peaks, config, step, ratios):
  """The table; adds shares and ratios to the peaks to `ratios`."""
  groups = {(IDLE, ''): [max(0.0, 1 - sum(c.share for c in costs)), 0.0]}
  for cost in costs:
    group = groups.setdefault(cost.where, [0.0, 0.0])
    group[0] += cost.share
    group[1] += cost.moved
  rows = [('layer and pass', '% step', 'GF/s', '% of peak', 'GB/s', '% of peak')]
  for kind, direction in sorted(groups, key=_order):
    share, moved = groups[kind, direction]
    label = ', '.join(filter(None, (kind, direction)))
    key = label.replace(', ', '_').replace(' ', '_')
    ratios[f'share_{key}'] = share
    wide = config.model.param_dtype if kind == 'head' else config.model.dtype
    peak = peaks.get(wide, peaks['float32'])
    cells = [f'{100 * share:.1f}']
    for name, count, limit in (
      ('flops', counts.get((kind, direction), 0), peak),
      ('bytes', moved, peaks['memory']),
    ):
      rate = count / (share * step) if share else 0
      cells += [f'{rate / 1e9:.1f}', f'{100 * rate / limit:.0f}']
      if not count:
        cells[-2:] = ['', '']
      else:
        ratios[f'{name}_of_peak_{key}'] = rate / limit
    rows.append((label, *cells))
  rate = sum(counts.values()) / step
  peak = peaks.get(config.model.dtype, peaks['float32'])
  ratios['flops_of_peak_step'] = rate / peak
  rows.append(('the step', '100.0', f'{rate / 1e9:.1f}', f'{100 * rate / peak:.0f}', '', ''))
  return rows


def _order(where):
  kind, direction = where
  first = _KINDS.index(kind) if kind in _KINDS else -1
  return first, kind, _places.PASSES.index(direction)


def _show_top(program, costs, step, count):
  """The instructions that take longest."""
  print('% step   GB/s  instruction')
  for cost in sorted(costs, key=lambda c: -c.share)[:count]:
    rate = cost.moved / (cost.share * step) / 1e9 if cost.share else 0
    label = ', '.join(filter(None, cost.where))
    print(f'{100 * cost.share:6.1f} {rate:6.1f}  {cost.instruction.name}')
    print(f'{"":15} {label}: {program.origin(cost.instruction)}')


if __name__ == '__main__':
  xla_flags.use_huge_pages()
  main()
