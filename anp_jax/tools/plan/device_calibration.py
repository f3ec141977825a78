"""Times the training step of a config on the device at hand.

T(b) = a + c b, the seconds of a step of b images, explains most of strong
scaling; two batch sizes give a and c. A CPU's steps are timed together with
their input, since the same cores compute both.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import math
import os
import statistics

import jax
import ml_collections

from anp_jax import config as config_lib, experiment
from anp_jax.costs import hardware, work
from anp_jax.runtimes.calibration import workloads
from anp_jax.system import compile_cache, compute_dtype, cores, memory, stopwatch, xla_flags
from anp_jax.tools.plan import plan_tables, sizes

_TURNS = 5
_MOST_SECONDS = 10.0  # of the turns of one batch size
# What stands for a device without an entry: a card in a PCIe slot, a TPU.
_UNKNOWN = {'gpu': 'l40s', 'tpu': 'tpu-v4'}
# JAX may use this share of a GPU's memory unless a variable says otherwise;
# `memory_stats` counts no more.
_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class Measurement:
  """A step's seconds on one device.

  Attributes:
    fixed: a in T(b) = a + c b, 0 or more.
    per_image: c in T(b) = a + c b.
    jitter: standard deviation over the mean of the larger batch's steps.
    batches: (images, median seconds) of the two batch sizes.
    device: kind of the device, as JAX names it.
    platform: 'cpu', 'gpu' or 'tpu'.
    memory: bytes of the device; 0: unknown.
    handling: times of a gradient of `parameter_server`, see `gradient_handling.seconds`; None:
      not timed.
  """

  fixed: float
  per_image: float
  jitter: float
  batches: tuple[tuple[int, float], ...]
  device: str
  platform: str
  memory: float = 0
  handling: tuple[float, float] | None = None

  def to_json(self) -> dict:
    """Returns what was timed, in seconds."""
    names = ('fixed', 'per_image', 'jitter', 'batches')
    handling = zip(('at_worker', 'at_server'), self.handling or ())
    return {name: getattr(self, name) for name in names} | dict(handling)


def line(batches: Sequence[tuple[float, float]]) -> tuple[float, float]:
  """Returns a and c of T(b) = a + c b through two measured steps.

  Where noise makes one of them negative, a is 0 and c the larger batch's seconds per image.

  Args:
    batches: two pairs of images and seconds, the smaller one first.
  """
  (few, low), (many, high) = batches
  per_image = (high - low) / (many - few)
  fixed = low - per_image * few
  if fixed < 0 or per_image <= 0:
    return 0.0, high / many
  return fixed, per_image


def measure(
  config: ml_collections.ConfigDict,
  workload: work.Workload,
  batches: Sequence[int] = (),
  serves: bool = False,
) -> Measurement:
  """Times a few real steps of two batch sizes on JAX's first device.

  Args:
    config: resolved config; a joint head's data are synthetic, with the workload's classes.
    workload: workload of the config.
    batches: the two batch sizes; (): the smallest of the config, and four times as many.
    serves: whether `parameter_server` is planned too; its handling of a gradient is then timed
      on a CPU, whose cores do it in place of computing.

  Raises:
    ConfigError: for batches that the config cannot have.
  """
  device = jax.local_devices()[0]
  compile_cache.enable(config)
  unit = sizes.unit(config) * config.accumulate
  batches = sorted(batches) or (max(unit, 8), 4 * max(unit, 8))
  if len(batches) != 2 or any(b % unit or b < 1 for b in batches):
    raise config_lib.ConfigError(
      f'--measure_batches={",".join(map(str, batches))}: expected two multiples of {unit}'
    )
  results, jitter = [], 0.0
  turn = _steps_a_turn(config, device)
  for images in batches:
    seconds = _seconds(config, workload, device, images)
    results.append((images, statistics.median(seconds)))
    spread = statistics.pstdev(seconds) / statistics.mean(seconds)
    jitter = spread * math.sqrt(turn)  # of a step, from the mean of a turn
  fixed, per_image = line(results)
  handling = None
  if serves and device.platform == 'cpu':
    # Its transport needs pyarrow, which a machine with an accelerator may lack.
    from anp_jax.tools.plan import gradient_handling

    single = _single(config, workload, batches[0])
    changes = {'strategy.name': 'parameter_server', 'strategy.servers': 1, 'mesh.data': -1}
    handling = gradient_handling.seconds(config_lib.replaced(single, changes))
  return Measurement(
    fixed,
    per_image,
    jitter,
    tuple(results),
    device.device_kind,
    device.platform,
    _memory(device),
    handling,
  )


def entry(
  measurement: Measurement, known_tables: plan_tables.Tables, devices: int
) -> tuple[hardware.Device, bool]:
  """Returns the table's entry of the measured device, with the memory that the device has.

  Args:
    measurement: measurement of the device.
    known_tables: devices and links.
    devices: devices of a node; on a CPU they divide the host's memory and cores.

  Returns:
    The device, and whether it has an entry; if not, an entry of its platform, whose link, host
    and year count.
  """
  kind, platform = measurement.device, measurement.platform
  if platform == 'cpu':
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9
    device = dataclasses.replace(
      known_tables.devices['cpu'], gigabytes=memory / devices, host_cores=cores.count() / devices
    )
    return device, True
  # A MIG slice carries the whole card's name.
  named = None if ' MIG ' in kind else known_tables.named_in(kind)
  device = named or known_tables.devices[_UNKNOWN[platform]]
  if measurement.memory:
    device = dataclasses.replace(device, gigabytes=measurement.memory / 1e9)
  return device, named is not None


def _memory(device) -> float:
  """Bytes of a device as it reports them; 0: it does not."""
  limit = memory.of_device(device, 'bytes_limit')
  if device.platform != 'gpu':
    return limit
  shares = [os.environ[n] for n in xla_flags.MEMORY if os.environ.get(n)]
  return limit / float(shares[0] if shares else _SHARE)


def _steps_a_turn(config, device) -> int:
  """Steps that are timed together.

  Some of a CPU wait for a batch. An accelerator's host starts a step while the
  one before is computed: a step by itself took an H200 5 ms longer.
  """
  return config.data.prefetch + 1 if device.platform == 'cpu' else 10


def _seconds(config, workload, device, images) -> list[float]:
  """Seconds of a step, by turn, the first ones left out."""
  opened = experiment.open(_single(config, workload, images), [device])
  count = _steps_a_turn(config, device)
  # The cores of a CPU that compute also make the batches, some of them ahead.
  on_cpu = device.platform == 'cpu'
  feed = contextlib.closing(opened.batches()) if on_cpu else contextlib.nullcontext()
  with feed as batches, jax.default_device(device):
    run = workloads.step(opened.program, opened.spec, images, batches)
    turn = functools.partial(run, count)
    run()
    first = stopwatch.timed(turn)
    turns = max(3, min(_TURNS, int(_MOST_SECONDS / first)))
    return [stopwatch.timed(turn) / count for _ in range(turns)]


def _single(config, workload, images):
  """The config of a run on one device."""
  changes = {'strategy.name': 'sync', 'mesh.data': 1, 'mesh.model': 1, 'batch_size': images}
  if config.model.head == 'joint':
    changes |= {
      'data.source': 'synthetic',
      'data.synthetic_classes': workload.layers[-1].outputs,
      'data.synthetic_examples': workload.examples,
    }
  return compute_dtype.decide(config_lib.replaced(config, changes), '')
