"""What a network's convolutions take on each device, and what travels."""

from concurrent import futures
import dataclasses
import json
import os
import platform
import statistics
import time

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from anp_jax import assembly
from anp_jax import mesh as mesh_lib
from anp_jax import state as state_lib
from anp_jax.strategies.kernel_split import convolutions
from anp_jax.strategies.kernel_split import costs as costs_lib
from anp_jax.strategies.kernel_split import plan as plan_lib

FILE = 'kernel_split.json'
# Of a layer's features, what is timed.
_PARTS = (0.25, 0.5, 1.0)
# Bytes of collectives; the last only where that before takes less than _QUICK.
_SIZES = (4 * 2**10, 4 * 2**20, 32 * 2**20)
_QUICK = 0.05  # seconds
_ROUNDS, _SECONDS = (3, 30), 4.0  # at least and at most, where time is left


def planned(config, mesh, objective, batch_size, examples, workdir, processes):
  """Times devices and links, and decides what is split; all processes call it.

  What was measured is kept in the workdir, and used again by a run that goes on
  with the same network on the same devices.

  Args:
    config: the run's config.
    mesh: of the run.
    objective: `objective.Objective`.
    batch_size: images a step over all devices.
    examples: images an epoch.
    workdir: of the run.
    processes: `cluster.Processes`.

  Returns:
    The text for config.strategy.plan, and lines for people.
  """
  rows = batch_size // mesh_lib.batch_devices(mesh)
  names = _names(mesh, processes)
  key = {
    'devices': names,
    'mesh': list(mesh.devices.shape),
    'images': rows,
    'model': json.loads(config.model.to_json()),
    'image_size': config.data.image_size,
    'layers': config.strategy.split_layers,
  }
  path = os.path.join(workdir, FILE)
  saved = None
  if not processes.index and os.path.exists(path):
    with open(path) as f:
      saved = json.load(f)
  saved = processes.gather(saved)[0]
  if saved and saved['key'] == key:
    costs = from_json(saved['costs'])
    plan = {k: tuple(v) for k, v in saved['plan'].items()}
  else:
    costs = measure(
      config, mesh, objective, batch_size, examples, processes, names
    )
    plan = costs.best()
    if not processes.index:
      text = {'key': key, 'costs': dataclasses.asdict(costs), 'plan': plan}
      with open(path + '.new', 'w') as f:
        json.dump(text, f, indent=1)
      os.replace(path + '.new', path)
  return str(plan_lib.Plan(plan)), costs.table(plan)


def measure(
  config, mesh, objective, batch_size: int, examples: int, processes, names=()
) -> costs_lib.Costs:
  """Times the network's convolutions, its step and the mesh's collectives.

  All devices work at once, as in a step, so those that share a memory or a core
  are timed as they will be.

  Args:
    config: the run's config.
    mesh: of the run.
    objective: `objective.Objective`.
    batch_size: images a step over all devices.
    examples: images an epoch.
    processes: `cluster.Processes`; all call it.
    names: of the devices along mesh.model.
  """
  rows, turns = batch_size // mesh_lib.batch_devices(mesh), config.accumulate
  own = _unsplit(config)
  devices = [
    d for d in mesh.devices.flat if d.process_index == jax.process_index()
  ]
  meshes = [mesh_lib.create(own, [d]) for d in devices]
  made = [
    assembly.create(own, m, objective, batch_size, examples) for m in meshes
  ]
  programs = [
    [_step(p, own, m, rows) for p, m in zip(made, meshes, strict=True)]
  ]
  split = plan_lib.Shares((), config.strategy.split_layers)
  found, places = {}, {}
  for call in _calls(made[0], own, rows):
    if split.counts(call.layer, call.features, 2) is None:
      continue
    kind = (call.x, call.kernel, call.y, call.from_images)
    if kind not in places:
      ways = [(call.features, False)]
      ways += [(n, True) for n in _counts(call.features)]
      places[kind] = slice(len(programs), len(programs) + len(ways))
      programs += [[_convolution(call, *way) for _ in devices] for way in ways]
    found.setdefault(call.layer, []).append((call, places[kind]))
  seconds = _at_once(processes, devices, programs)
  # Seconds of each layer, by way and by device of this process.
  times = {
    layer: turns * sum(seconds[place] for _, place in uses)
    for layer, uses in found.items()
  }
  own_times = [
    {
      'device': d.id,
      'step': seconds[0, i],
      'layers': {layer: t[:, i].tolist() for layer, t in times.items()},
    }
    for i, d in enumerate(devices)
  ]
  by_device = {
    t['device']: t for part in processes.gather(own_times) for t in part
  }
  columns = mesh.devices.reshape(-1, mesh.shape[mesh_lib.MODEL]).T

  def slowest(of):
    """Along mesh.model, of the devices with other parts of the batch."""
    return np.array(
      [np.max([of(by_device[d.id]) for d in column], 0) for column in columns]
    )

  layers = {}
  for layer, uses in found.items():
    first = uses[0][0]
    each = slowest(lambda t, layer=layer: t['layers'][layer])
    layers[layer] = costs_lib.Layer(
      features=first.features,
      alone=tuple(each[:, 0].tolist()),
      counts=_counts(first.features),
      seconds=tuple(map(tuple, each[:, 1:].tolist())),
      output=turns * sum(_bytes(call.y) for call, _ in uses),
      input=turns * sum(_bytes(c.x) for c, _ in uses if not c.from_images),
      kernel=_bytes(first.kernel),
    )
  params = sum(map(_bytes, jax.tree.leaves(made[0].one.params)))
  return costs_lib.Costs(
    names=tuple(names) or tuple(_names(mesh, processes)),
    whole=tuple(slowest(lambda t: t['step']).tolist()),
    layers=layers,
    others=params - sum(layer.kernel for layer in layers.values()),
    link=_link(mesh, processes),
    multiple=costs_lib.MULTIPLES.get(mesh_lib.platform(mesh), 1),
  )


def _names(mesh, processes):
  """Of the devices along mesh.model: processor and host."""
  hosts = processes.gather(f'{platform.node()}, rank {processes.index}')
  kinds = processes.gather(_processor())
  first = mesh.devices.reshape(-1, mesh.shape[mesh_lib.MODEL])[0]
  return [
    f'{kinds[d.process_index] if d.platform == "cpu" else d.device_kind} '
    f'({hosts[d.process_index]})'
    for d in first
  ]


def _processor():
  """The CPU's name and how many of its cores this process may use."""
  name = platform.machine()
  try:
    with open('/proc/cpuinfo') as f:
      found = [line for line in f if line.startswith('model name')]
    name = found[0].partition(':')[2].strip() if found else name
    cores = len(os.sched_getaffinity(0))
  except (OSError, AttributeError):  # not of Linux
    cores = os.cpu_count()
  return f'{name}, {cores} core{"s" if cores > 1 else ""}'


def _at_once(processes, devices, programs) -> np.ndarray:
  """Seconds of programs of one device each, all devices running together.

  Program after program, round after round: a machine that is slower for a while
  is so for all of them.

  Args:
    processes: `cluster.Processes`.
    devices: of this process.
    programs: of each what makes, for each device, the function to be timed.

  Returns:
    (programs, devices) medians over the rounds.
  """
  made = []
  for program in programs:
    processes.beat('compiling')
    made.append([])
    for device, make in zip(devices, program, strict=True):
      with jax.default_device(device):
        made[-1].append(make())
        made[-1][-1]()
  rounds, spent = [], 0.0
  with futures.ThreadPoolExecutor(len(devices)) as pool:
    while len(rounds) < _ROUNDS[0] or (
      spent < _SECONDS and len(rounds) < _ROUNDS[1]
    ):  # fmt: skip
      processes.beat('compiling')
      start = time.perf_counter()
      rounds.append([])
      for program in made:
        processes.gather('ready')
        rounds[-1].append(list(pool.map(timed, program)))
      spent += max(processes.gather(time.perf_counter() - start))
  return np.median(rounds, 0)


def timed(run) -> float:
  """Seconds that a function takes."""
  start = time.perf_counter()
  run()
  return time.perf_counter() - start


def alone(config, device, objective, batch_size: int, examples: int):
  """A function that makes a step of the unsplit network on one device.

  Args:
    config: the run's config.
    device: jax.Device of this process.
    objective: `objective.Objective`.
    batch_size: images it is given.
    examples: images an epoch.
  """
  own = _unsplit(config)
  mesh = mesh_lib.create(own, [device])
  parts = assembly.create(own, mesh, objective, batch_size, examples)
  with jax.default_device(device):
    return _step(parts, own, mesh, batch_size)()


def images(config, mesh, rows: int):
  """A batch of noise on a mesh."""
  batch = {
    name: np.zeros(like.shape, like.dtype)
    for name, like in assembly.abstract_batch(config, mesh, rows).items()
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


def _unsplit(config):
  """The config of the network that is not split, on one device."""
  own = config.copy_and_resolve_references()
  own.strategy.name = 'sync'
  own.mesh.data = own.mesh.model = 1
  return own


def _step(parts, config, mesh, rows):
  """() -> a function that makes a step of the network that is not split."""

  def make():
    held = [state_lib.create(parts.init, parts.like)]
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
  variables = {'params': parts.one.params, **parts.one.stats}
  return convolutions.find(parts.model, variables, images)


def _counts(features):
  return tuple(sorted({max(round(features * part), 1) for part in _PARTS}))


def _convolution(call, count, split):
  """() -> a function that computes some of a convolution's features.

  Of a split layer it is a branch: XLA may compile that otherwise.
  """

  def both(x, kernel, dy):
    if call.from_images:
      y, pull = jax.vjp(lambda kernel: call.convolve(x, kernel), kernel)
    else:
      y, pull = jax.vjp(call.convolve, x, kernel)
    return y, pull(dy)

  def make():
    random = np.random.default_rng(0)

    def normal(like, *features):
      shape = (*like.shape[: 4 - len(features)], *features)
      return jnp.asarray(random.normal(size=shape), like.dtype)

    arguments = (
      normal(call.x), normal(call.kernel, count), normal(call.y, count)
    )  # fmt: skip

    def branch(choice, *arguments):
      found = jax.eval_shape(both, *arguments)
      nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), found)
      return lax.switch(choice, [both, lambda *_: nothing], *arguments)

    chosen = (jnp.zeros((), jnp.int32), *arguments)
    if not split:
      branch = lambda _, *arguments: both(*arguments)  # noqa: E731
    compiled = jax.jit(branch).lower(*chosen).compile()
    return lambda: jax.block_until_ready(compiled(*chosen))

  return make


def _link(mesh, processes) -> costs_lib.Link:
  """Times gathers and sums over the axis 'model'."""
  devices = mesh.shape[mesh_lib.MODEL]

  def gather(x):
    parts = lax.all_gather(x, mesh_lib.MODEL)
    return jnp.concatenate(list(parts), -1)

  def total(x):
    return lax.psum(x, mesh_lib.MODEL)

  def seconds(collective, size, each):
    count = size // 4 // each // 64
    mapped = jax.jit(
      jax.shard_map(
        collective, mesh=mesh, in_specs=mesh_lib.P(), out_specs=mesh_lib.P(),
        check_vma=False,
      )
    )  # fmt: skip
    zeros = jax.jit(
      lambda: jnp.zeros((64, count)), out_shardings=mesh_lib.replicated(mesh)
    )()
    jax.block_until_ready(mapped(zeros))
    processes.beat('compiling')
    # The same number of calls on all processes, or they would wait for ever.
    found = [
      timed(lambda: jax.block_until_ready(mapped(zeros))) for _ in range(7)
    ]
    return max(processes.gather(statistics.median(found)))

  def line(collective, each):
    small, large = _SIZES[:2]
    first, last = (seconds(collective, n, each) for n in (small, large))
    if last < _QUICK:
      large = _SIZES[2]
      last = seconds(collective, large, each)
    slope = max(last - first, 0.0) / (large - small)
    return max(first - small * slope, 0.0), slope

  return costs_lib.Link(line(gather, devices), line(total, 1))


def _bytes(like):
  return int(np.prod(like.shape)) * jnp.dtype(like.dtype).itemsize


def from_json(found: dict) -> costs_lib.Costs:
  """From what dataclasses.asdict gave, also by way of JSON."""
  layers = {
    path: costs_lib.Layer(
      **{
        **x,
        'alone': tuple(x['alone']),
        'counts': tuple(x['counts']),
        'seconds': tuple(map(tuple, x['seconds'])),
      }
    )
    for path, x in found['layers'].items()
  }
  link = costs_lib.Link(**{k: tuple(v) for k, v in found['link'].items()})
  return costs_lib.Costs(
    **{
      **found,
      'names': tuple(found['names']),
      'whole': tuple(found['whole']),
      'layers': layers,
      'link': link,
    }
  )
