"""The largest batch whose step fits the memory of a run's devices.

XLA says what a compiled step needs, so no step is made to find out: an
allocation that fails would end the process on a CPU, and cut an accelerator's
memory into pieces. The need is nearly a line in the images of the batch, with
the state at 0: two programs give it. (A batch of a million images takes XLA
minutes to compile.)
"""

import dataclasses
import math

import jax

from anp_jax import config as config_lib
from anp_jax.parallel import division, mesh as mesh_lib
from anp_jax.system import memory
from anp_jax.training import build, microsteps


@dataclasses.dataclass(frozen=True)
class Fit:
  """What fits a memory.

  Attributes:
    images: of the largest batch; 0 where none fits.
    step_bytes: that a step of the config's own batch needs, see `of_step`.
    limit_bytes: that there are.
  """

  images: int
  step_bytes: int
  limit_bytes: int


def find(trial, processes) -> Fit:
  """Finds the largest batch; all processes call it, and all get the same.

  Args:
    trial: `trial.Trial` of the run.
    processes: `cluster.Processes`.
  """
  needs = []
  images = trial.config.batch_size
  for batch in (images, 2 * images):
    processes.heartbeat('compiling')
    needs.append(max(processes.gather(of_step(trial, batch))))
  limit = min(processes.gather(_limit(trial.mesh, processes)))
  unit = division.unit(trial.config, trial.mesh)
  return Fit(largest(images, *needs, limit) // unit * unit, needs[0], limit)


def largest(images: int, need: int, twice: int, limit: int) -> int:
  """Returns the images at which a line through two needs meets the limit.

  Args:
    images: of a batch.
    need: bytes of a step of that batch.
    twice: bytes of a step of a batch twice as large.
    limit: bytes that there are.
  """
  an_image = max(twice - need, 1) / images
  return max(int(images + (limit - need) / an_image), 0)


def of_step(trial, images: int) -> int:
  """Returns the bytes that a step needs of a device's memory.

  On a CPU they are those of all devices of this process. What oneDNN takes
  within an operation is not counted.

  Args:
    trial: `trial.Trial` of the run.
    images: of the batch.
  """
  spec = trial.program.spec
  # Durations in epochs might leave such a batch without steps.
  changes = {
    'batch_size': images,
    'duration': '1000000 steps',
    'schedule.name': 'constant',
    'schedule.warmup': '0 steps',
  }
  config = config_lib.replaced(spec.config, changes)
  program = build.create(dataclasses.replace(spec, config=config, batch_size=images))
  batch = build.abstract_batch(config, spec.mesh, images)
  compiled = program.train_step.lower(program.abstract_state, batch).compile()
  sizes = compiled.memory_analysis()
  results = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
  if isinstance(compiled, microsteps.Compiled):
    results *= compiled.sequence.count
  # Batches that wait, that is being put, and that is computed.
  batches = config.data.prefetch + 2
  total = (
    _bytes(program.abstract_state) + batches * _bytes(batch) + sizes.temp_size_in_bytes + results
  )
  on_cpu = mesh_lib.platform(spec.mesh) == 'cpu'
  return total * (_local_devices(spec.mesh) if on_cpu else 1)


def _limit(mesh, processes):
  """Bytes that a device has, or on a CPU this process."""
  if mesh_lib.platform(mesh) == 'cpu':
    neighbours = processes.hosts.count(processes.hosts[processes.index])
    return memory.available() // neighbours
  return min(
    memory.of_device(d, 'bytes_limit')
    for d in mesh.devices.flat
    if d.process_index == jax.process_index()
  )


def _bytes(tree) -> int:
  """Bytes that one device holds of arrays with shardings."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )


def _local_devices(mesh):
  return sum(d.process_index == jax.process_index() for d in mesh.devices.flat)
