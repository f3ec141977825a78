"""What a network's convolutions take on each device, and what travels."""

from concurrent import futures
import dataclasses
import math
import time

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from anp_jax import config as config_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel import state as state_lib
from anp_jax.parallel.channel_split import convolutions
from anp_jax.parallel.channel_split import plan as plan_lib
from anp_jax.runtimes.calibration import costs as costs_lib
from anp_jax.training import build

# Of a layer's features, what is timed.
_PARTS = (0.25, 0.5, 1.0)
# Bytes of collectives; the last only where that before takes less than _QUICK.
_SIZES = (4 * 2**10, 4 * 2**20, 32 * 2**20)
_QUICK = 0.05  # seconds


class Timing:
  """Times convolutions, the whole step and collectives, round after round.

  In a round each is run once, so a machine that is slower for a while is so for
  all of them. All devices work at once, as in a step: those that share a memory
  or a core are timed as they will be.
  """

  def __init__(self, spec, processes):
    """Compiles all of it; all processes call it.

    Args:
      spec: `training.run_spec.RunSpec`.
      processes: `cluster.Processes`.
    """
    config, mesh = spec.config, spec.mesh
    rows = spec.batch_size // mesh_lib.batch_devices(mesh)
    own = _unsplit(config)
    self._mesh, self._processes = mesh, processes
    self._turns = config.accumulate
    self._devices = [
      d for d in mesh.devices.flat if d.process_index == jax.process_index()
    ]
    meshes = [mesh_lib.create(own, [d]) for d in self._devices]
    made = [
      build.create(
        dataclasses.replace(spec, config=own, mesh=m, offload_devices=())
      )
      for m in meshes
    ]
    # Gradients travel in a dtype of their own; of float64 never in less.
    wire = jnp.dtype(config.strategy.reduce_dtype).itemsize
    self._wire = 8 if config.model.param_dtype == 'float64' else wire
    leaves = jax.tree.leaves(made[0].abstract_single.params)
    self._params = self._wire * sum(leaf.size for leaf in leaves)
    # Each a function that makes the one that is timed, by device.
    programs = [
      [_step(p, own, m, rows) for p, m in zip(made, meshes, strict=True)]
    ]
    split = plan_lib.Shares((), config.strategy.split_layers)
    # Uses of each layer: what it computes, and which programs that is.
    self._uses, places = {}, {}
    for call in _calls(made[0], own, rows):
      if split.counts(call.layer, call.features, 2) is None:
        continue
      kind = (_traced(call), call.reads_images)
      if kind not in places:
        ways = [(call.features, False)]
        ways += [(n, True) for n in _counts(call.features)]
        places[kind] = slice(len(programs), len(programs) + len(ways))
        held = [{} for _ in self._devices]
        programs += [
          [_convolution(call, *way, arrays) for arrays in held]
          + self._more(call, *way)
          for way in ways
        ]
      self._uses.setdefault(call.layer, []).append((call, places[kind]))
    if not self._uses:
      raise config_lib.ConfigError(
        f'config.strategy.split_layers={config.strategy.split_layers!r}: no '
        'convolution has such a path'
      )
    self._programs = [self._compiled(program) for program in programs]
    self._collectives = self._links()
    self._rounds, self._travels = [], []

  def round(self) -> None:
    """Runs everything once; all processes call it equally often."""
    processes = self._processes
    self._rounds.append([])
    at_once = max(map(len, self._programs))
    with futures.ThreadPoolExecutor(at_once) as pool:
      for program in self._programs:
        processes.heartbeat('timing')
        processes.gather('ready')
        self._rounds[-1].append(list(pool.map(timed, program)))
    processes.gather('ready')
    self._travels.append([timed(run) for _, _, run in self._collectives])

  def costs(self, names, alike: bool) -> costs_lib.Costs:
    """Medians over the rounds; the same on all processes.

    Args:
      names: of the devices along mesh.model, for people.
      alike: whether they are of one kind.
    """
    times = self._layers()
    steps = self._times(0)
    own = [
      {
        'device': d.id,
        'step': steps[i],
        'layers': {layer: t[:, i].tolist() for layer, t in times.items()},
      }
      for i, d in enumerate(self._devices)
    ]
    by_device = {
      t['device']: t for part in self._processes.gather(own) for t in part
    }
    mesh = self._mesh
    columns = mesh.devices.reshape(-1, mesh.shape[mesh_lib.MODEL]).T

    def slowest(of):
      """Along mesh.model, of the devices with other parts of the batch."""
      return np.array(
        [np.max([of(by_device[d.id]) for d in column], 0) for column in columns]
      )

    layers = {
      layer: self._layer(
        [call for call, _ in uses],
        slowest(lambda t, layer=layer: t['layers'][layer]),
      )
      for layer, uses in self._uses.items()
    }
    found = costs_lib.Costs(
      names=tuple(names),
      whole=tuple(slowest(lambda t: t['step']).tolist()),
      layers=layers,
      others=self._params - sum(layer.kernel for layer in layers.values()),
      link=self._link(),
      alike=alike,
      multiple=costs_lib.MULTIPLES.get(mesh_lib.platform(mesh), 1),
    )
    return costs_lib.pooled(found)

  def _layers(self):
    """Seconds of each layer, by way and by device of this process."""
    return {
      layer: self._turns * sum(self._ways(place) for _, place in uses)
      for layer, uses in self._uses.items()
    }

  def _ways(self, place):
    """Seconds of a layer's programs, by way and by device of this process."""
    return np.array([self._times(p) for p in range(place.start, place.stop)])

  def _more(self, call, count, split):
    """Makers of what is timed beside the mesh's devices."""
    del call, count, split
    return []

  def _times(self, program):
    """Seconds of a program, medians over the rounds, by device."""
    return np.median([r[program] for r in self._rounds], 0)

  def _layer(self, calls, seconds):
    """Of a layer's calls and (devices, ways) seconds."""
    first, turns = calls[0], self._turns
    return costs_lib.Layer(
      features=first.features,
      alone=tuple(seconds[:, 0].tolist()),
      counts=_counts(first.features),
      seconds=tuple(map(tuple, seconds[:, 1:].tolist())),
      output=turns * sum(_bytes(call.y) for call in calls),
      input=turns * sum(_bytes(c.x) for c in calls if not c.reads_images),
      kernel=self._wire * math.prod(first.kernel.shape),
      uses=turns * len(calls),
    )

  def _compiled(self, program):
    """The functions of a program's makers, each run once."""
    self._processes.heartbeat('compiling')
    runs = []
    for place, make in enumerate(program):
      # Others than this process's devices are no matter of JAX's here.
      own = self._devices[place] if place < len(self._devices) else None
      with jax.default_device(own):
        runs.append(make())
        runs[-1]()
    return runs

  def _links(self):
    """(kind, bytes, function) of gathers and sums over the axis 'model'."""
    found = []
    for kind, collective in (('gather', _gather), ('total', _total)):
      for size in _SIZES:
        self._processes.heartbeat('compiling')
        sent, run = self._collective(kind, collective, size)
        run()
        found.append((kind, sent, run))
        if size > _SIZES[0] and (
          max(self._processes.gather(timed(run))) > _QUICK
        ):
          break
    return found

  def _collective(self, kind, collective, size):
    mesh = self._mesh
    parts = mesh.shape[mesh_lib.MODEL] if kind == 'gather' else 1
    columns = max(size // 4 // parts // 64, 1)
    mapped = jax.jit(
      jax.shard_map(
        collective, mesh=mesh, in_specs=mesh_lib.P(), out_specs=mesh_lib.P(),
        check_vma=False,
      )
    )  # fmt: skip
    zeros = jax.jit(
      lambda: jnp.zeros((64, columns), jnp.float32),
      out_shardings=mesh_lib.replicated(mesh),
    )()
    sent = 4 * 64 * columns * parts
    return sent, lambda: jax.block_until_ready(mapped(zeros))

  def _link(self):
    medians = np.median(self._travels, 0).tolist()
    medians = np.max(self._processes.gather(medians), 0)
    lines = {}
    for kind in ('gather', 'total'):
      sizes, times = zip(
        *(
          (size, seconds)
          for (k, size, _), seconds in zip(self._collectives, medians)
          if k == kind
        )
      )
      slope = max(times[-1] - times[0], 0.0) / (sizes[-1] - sizes[0])
      lines[kind] = (max(times[0] - sizes[0] * slope, 0.0), float(slope))
    return costs_lib.Link(**lines)


def alone(spec, device):
  """A function that makes a step of the unsplit network on one device.

  Args:
    spec: `training.run_spec.RunSpec`.
    device: jax.Device of this process.
  """
  own = _unsplit(spec.config)
  mesh = mesh_lib.create(own, [device])
  parts = build.create(
    dataclasses.replace(spec, config=own, mesh=mesh, offload_devices=())
  )
  with jax.default_device(device):
    return _step(parts, own, mesh, spec.batch_size)()


def images(config, mesh, rows: int):
  """A batch of noise on a mesh."""
  batch = {
    name: np.zeros(like.shape, like.dtype)
    for name, like in build.abstract_batch(config, mesh, rows).items()
  }
  shape = batch['image'].shape
  batch['image'] = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
  batch['row'] = np.arange(rows, dtype=np.int32)
  batch['weight'] += 1
  sharding = mesh_lib.batch_sharding(mesh)
  return {
    name: jax.make_array_from_callback(
      x.shape, sharding, lambda index, x=x: x[index]
    )
    for name, x in batch.items()
  }


def timed(run) -> float:
  """Seconds that a function takes."""
  start = time.perf_counter()
  run()
  return time.perf_counter() - start


def _unsplit(config):
  """The config of the network that is not split, on one device."""
  own = config.copy_and_resolve_references()
  own.strategy.name = 'sync'
  own.mesh.data = own.mesh.model = 1
  return own


def _step(parts, config, mesh, rows):
  """() -> a function that makes a step of the network that is not split."""

  def make():
    held = [state_lib.create(parts.init_fn, parts.abstract_state)]
    batch = images(config, mesh, rows)
    step = parts.train_step.lower(held[0], batch).compile()

    def run():
      held[0], values = step(held[0], batch)
      jax.block_until_ready(values)

    return run

  return make


def _calls(parts, config, rows):
  """The network's convolutions, of so many images a micro-batch."""
  side = config.data.image_size
  images = jax.ShapeDtypeStruct(
    (rows // config.accumulate, side, side, 3), jnp.dtype(config.model.dtype)
  )
  variables = {
    'params': parts.abstract_single.params,
    **parts.abstract_single.stats,
  }
  return convolutions.find(parts.model, variables, images)


def _counts(features):
  return tuple(sorted({max(round(features * part), 1) for part in _PARTS}))


def _convolution(call, count, split, held):
  """() -> a function that computes some of a convolution's features.

  Of a split layer it is what `operation.split` has a device do: in a branch,
  with its features cut out of the whole, and their gradient put back.

  Args:
    call: `convolutions.Call`.
    count: of features.
    split: whether it is a split layer's.
    held: where its operands are kept for other counts on the same device.
  """

  def whole(x, kernel, dy):
    y, pull = jax.vjp(call.convolve, x, kernel)
    dx, dw = pull(dy)
    return (y, dw) if call.reads_images else (y, dx, dw)

  def part(x, kernel, dy):
    y, *dx, dw = whole(x, kernel[..., :count], dy[..., :count])
    after = kernel.shape[-1] - count
    return y, *dx, jnp.pad(dw, ((0, 0),) * (dw.ndim - 1) + ((0, after),))

  def branch(choice, *arguments):
    found = jax.eval_shape(part, *arguments)
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), found)
    return lax.switch(choice, [part, lambda *_: nothing], *arguments)

  def make():
    if not held:
      random = np.random.default_rng(0)
      held['arguments'] = [
        jnp.asarray(random.random(like.shape, np.float32) - 0.5, like.dtype)
        for like in (call.x, call.kernel, call.y)
      ]
    arguments = held['arguments']
    if split:
      arguments = [jnp.zeros((), jnp.int32), *arguments]
    function = branch if split else whole
    compiled = jax.jit(function).lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))

  return make


def _traced(call):
  """What a convolution computes, as text: alike for alike ones."""
  return str(jax.make_jaxpr(call.convolve)(call.x, call.kernel))


def _gather(x):
  return jnp.concatenate(list(lax.all_gather(x, mesh_lib.MODEL)), -1)


def _total(x):
  return lax.psum(x, mesh_lib.MODEL)


def _bytes(like):
  return int(np.prod(like.shape)) * jnp.dtype(like.dtype).itemsize
