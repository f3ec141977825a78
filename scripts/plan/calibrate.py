"""Times the training step of a config on the device at hand.

T(b) = a + c b, the seconds of a step of b images, explains most of strong
scaling; two batch sizes give a and c.
"""

from collections.abc import Sequence
import dataclasses
import os
import statistics

import jax

from anp_jax import config as config_lib
from anp_jax.data import sources
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.runtimes.calibration import timing
from anp_jax.runtimes.calibration import workloads
from anp_jax.system import compile_cache
from anp_jax.system import compute_dtype
from anp_jax.system import cores
from anp_jax.training import build
from anp_jax.training import objective as objective_lib
from anp_jax.training import run_spec
from scripts.plan import sizes
from scripts.plan import tables

_STEPS = 5
_MOST_SECONDS = 10.0  # of the steps of one batch size
# A device that is in no table, where its own numbers are not asked for.
_UNKNOWN = {'gpu': 'a100-40', 'tpu': 'tpu-v4', 'cpu': 'cpu'}


@dataclasses.dataclass(frozen=True)
class Measurement:
  """A step's seconds on one device.

  Attributes:
    fixed: a of T(b) = a + c b, 0 or more.
    per_image: c.
    jitter: standard deviation over the mean, of the larger batch's steps.
    batches: images that were timed, and the median seconds of each.
    device: kind, as JAX names it.
    platform: 'cpu', 'gpu' or 'tpu'.
  """

  fixed: float
  per_image: float
  jitter: float
  batches: tuple[tuple[int, float], ...]
  device: str
  platform: str


def line(batches: Sequence[tuple[float, float]]) -> tuple[float, float]:
  """The a and c of T(b) = a + c b through two measured steps.

  Args:
    batches: two pairs of images and seconds, the smaller one first.

  Returns:
    a and c; where noise makes a negative, 0 and the larger batch's seconds an
    image; where it makes c negative, the same.
  """
  (few, low), (many, high) = batches
  per_image = (high - low) / (many - few)
  fixed = low - per_image * few
  if fixed < 0 or per_image <= 0:
    return 0.0, high / many
  return fixed, per_image


def measure(config, workload, batches: Sequence[int] = ()) -> Measurement:
  """Times a few real steps of two batch sizes on JAX's first device.

  Args:
    config: resolved; data are made up, of the workload's classes.
    workload: of the config.
    batches: images of the two; (): the fewest that the config can have, and
      four times as many.

  Raises:
    ConfigError: for batches that the config cannot have.
  """
  device = jax.local_devices()[0]
  compile_cache.enable(config)
  unit = sizes.unit(config) * config.accumulate
  batches = sorted(batches) or (max(unit, 8), 4 * max(unit, 8))
  if len(batches) != 2 or any(b % unit or b < 1 for b in batches):
    raise config_lib.ConfigError(
      f'--measure_batches={",".join(map(str, batches))}: expected two '
      f'multiples of {unit}'
    )
  results, jitter = [], 0.0
  for images in batches:
    seconds = _seconds(config, workload, device, images)
    results.append((images, statistics.median(seconds)))
    jitter = statistics.pstdev(seconds) / statistics.mean(seconds)
  fixed, per_image = line(results)
  return Measurement(
    fixed, per_image, jitter, tuple(results), device.device_kind,
    device.platform,
  )  # fmt: skip


def entry(
  measurement: Measurement, known_tables: tables.Tables
) -> tables.Device:
  """The table's device that was measured, with this host's memory and cores."""
  platform = measurement.platform
  if platform == 'cpu':
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9
    return dataclasses.replace(
      known_tables.devices['cpu'], gigabytes=memory, host_cores=cores.count()
    )
  kind = measurement.device.replace('NVIDIA ', '')
  for name, device in known_tables.devices.items():
    if name.replace('-', ' ') in kind.lower().replace('-', ' '):
      return device
  return known_tables.devices[_UNKNOWN[platform]]


def _seconds(config, workload, device, images) -> list[float]:
  """Seconds of some steps, the first ones left out."""
  spec = _spec(config, workload, device, images)
  with jax.default_device(device):
    run = workloads.step(build.create(spec), spec, images)
  run()
  first = timing.timed(run)
  steps = max(3, min(_STEPS, int(_MOST_SECONDS / first)))
  return [timing.timed(run) for _ in range(steps)]


def _spec(config, workload, device, images) -> run_spec.RunSpec:
  changes = {
    'strategy.name': 'sync', 'mesh.data': 1, 'mesh.model': 1,
    'batch_size': images,
  }  # fmt: skip
  if config.model.head == 'joint':
    changes |= {
      'data.source': 'synthetic',
      'data.synthetic_classes': workload.layers[-1].outputs,
      'data.synthetic_examples': workload.examples,
    }
  single = config_lib.replaced(config, changes)
  single = compute_dtype.decide(single, '')
  mesh = mesh_lib.create(single, [device])
  source = sources.open_source(single, training=True)
  objective = objective_lib.create(source.vocabulary, single)
  return run_spec.RunSpec(single, mesh, objective, images, len(source))
