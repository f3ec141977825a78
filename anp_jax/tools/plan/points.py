"""A plan: predictions for each size, and the size beyond which more devices do not pay."""

from collections.abc import Sequence
import dataclasses
import math

import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import strategy as strategy_lib
from anp_jax.costs import collectives, goodput as goodput_lib, steps
from anp_jax.tools.plan import intervals, plan_memory as memory_lib, sizes

# A size pays if its further devices bring at least this share of their own
# speed.
_PAYS = 0.5
# Milliseconds of a core for an image: a photograph of 400 px cut to 224 px, by
# config.data.decode or out of the mapped cache; an image of the embedded set.
# From `input_cost.measure` and scripts.bench.input on cores that other programs shared.
_PHOTOGRAPH = {'fast': 0.8, 'exact': 2.1, 'bilinear': 1.8, 'bicubic': 3.0, 'mapped': 0.2}
_EMBEDDED = 0.14
_NO_DECODING = ('synthetic', 'digits', 'arrays')
LOSSES = {
  'fixed': 'small batches: the fixed cost of a step',
  'communication': 'communication or waiting for the slowest device',
  'input': 'input: the host decodes too few images',
  'compute': 'computing: what is not divided',
}
_REPEATS = 'data: an epoch has fewer images than a batch'


@dataclasses.dataclass(frozen=True)
class Point:
  """The prediction for one strategy at one size.

  Attributes:
    strategy: name as typed, such as 'sync' or 'parameter_server:async'.
    cluster: nodes and links.
    images: images per step and device.
    rate: images/s.
    seconds: parts of a step's seconds: compute, communication with waiting for the slowest
      device, input, fixed.
    efficiency: rate over that of as many devices that never wait, with the images per device of
      the smallest size.
    memory: memory of a device.
    epoch_seconds, run_seconds: seconds to an epoch's images, and to the run's end.
    why_not: reason why it cannot run; '': it can.
    goodput: what it keeps when nodes fail, where that is asked for.
    interval: where the rate lies; None: no published rate is like it.
  """

  strategy: str
  cluster: collectives.Cluster
  images: int = 0
  rate: float = 0.0
  seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  efficiency: float = 0.0
  memory: memory_lib.Memory | None = None
  epoch_seconds: float = math.inf
  run_seconds: float = math.inf
  why_not: str = ''
  goodput: goodput_lib.Goodput | None = None
  interval: intervals.Interval | None = None

  @property
  def runs(self) -> bool:
    """Whether the batch divides and a device has room."""
    return not self.why_not

  @property
  def batch(self) -> float:
    """Images per step of all devices."""
    return round(self.rate * sum(self.seconds.values()), 6)

  @property
  def epoch_images(self) -> int:
    """Images of an epoch."""
    return round(self.rate * self.epoch_seconds)

  @property
  def repeats(self) -> bool:
    """Whether images repeat within a batch, which is larger than an epoch."""
    return self.memory is not None and self.batch > self.epoch_images

  @property
  def device_hours(self) -> float:
    """Devices times hours to the run's end."""
    return self.cluster.size * self.run_seconds / 3600

  def to_json(self) -> dict:
    """Plain numbers by name."""
    result = {'strategy': self.strategy, 'nodes': self.cluster.nodes, 'devices': self.cluster.size}
    if self.memory is not None:
      result |= {
        'images_per_device': self.images,
        'batch': self.batch,
        'memory_bytes': round(self.memory.total),
        'fits': self.memory.fits,
        'images_that_fit': self.memory.most_images,
        'images_per_second': round(self.rate, 2),
        'interval': self.interval and self.interval.to_json(self.rate),
        'efficiency': round(self.efficiency, 4),
        'step_seconds': {k: _rounded(v) for k, v in self.seconds.items()},
        'epoch_seconds': _rounded(self.epoch_seconds),
        'run_seconds': _rounded(self.run_seconds),
        'device_hours': _rounded(self.device_hours),
      }
    if self.goodput is not None:
      result['goodput'] = dataclasses.asdict(self.goodput)
    return result | ({'why_not': self.why_not} if self.why_not else {})


def _rounded(number) -> float:
  """A number of six digits, of however small a run."""
  return float(f'{number:.6g}')


@dataclasses.dataclass(frozen=True)
class Request:
  """What the flags ask for, without the sizes.

  Attributes:
    scaling: scaling of `sizes.images_per_device`.
    per_device: images per device; 0: those of the scaling.
    input_rate: images/s that a node's host decodes; 0: from its cores.
    image_seconds: seconds of a core for an image, as measured; 0: `input_seconds`.
  """

  scaling: str = 'auto'
  per_device: int = 0
  input_rate: float = 0.0
  image_seconds: float = 0.0


def plan(name: str, settings: Sequence[steps.Setting], request: Request) -> list[Point]:
  """Predicts one strategy at each size.

  Args:
    name: name of the strategy, as typed.
    settings: one setting per size, the smallest first.
    request: how the batch divides, and what the hosts decode.

  Returns:
    One point per size; those that cannot run say why.
  """
  result: list[Point] = []
  base, per_device = None, request.per_device
  for setting in settings:
    try:
      images = sizes.images_per_device(setting.config, setting.cluster, request.scaling, per_device)
      step = strategy_lib.find(setting.config).predicted_step(setting, images)
    except config_lib.ConfigError as e:
      result.append(Point(name, setting.cluster, why_not=str(e)))
      continue
    if base is None:
      base = images / setting.alone(images).total  # images/s of a device that never waits
    if request.scaling == 'weak':
      per_device = images  # those of the smallest size that can run
    result.append(_point(name, setting, images, step, request, base))
  return result


def _point(name, setting, images, step, request, base) -> Point:
  host = request.input_rate or _host_rate(setting, request.image_seconds)
  waiting = max(0.0, step.images / (host * setting.cluster.nodes) - step.seconds) if host else 0.0
  rate = step.images / (step.seconds + waiting)
  memory = memory_lib.count(setting, images)
  why_not = ''
  if not memory.fits:
    why_not = (
      f'{memory.total / 1e9:.1f} GB a device, and {setting.device.name} has '
      f'{memory.limit / 1e9:.1f}: at most {memory.most_images} images at a time'
    )
  return Point(
    strategy=name,
    cluster=setting.cluster,
    images=images,
    rate=rate,
    seconds={
      'compute': step.compute,
      'communication': step.communication,
      'input': waiting,
      'fixed': step.fixed,
    },
    efficiency=rate / (base * setting.cluster.size),
    memory=memory,
    epoch_seconds=setting.workload.examples / rate,
    run_seconds=_run_images(setting, step) * step.run_factor / rate,
    why_not=why_not,
  )


def _run_images(setting, step) -> float:
  """Images of the whole run; steps of a larger batch have more of them."""
  if strategy_lib.find(setting.config).keeps_models_apart:  # laps count, not steps
    return setting.workload.total_images
  examples = setting.workload.examples
  return config_lib.steps(setting.config.duration, step.images, examples) * step.images


def _host_rate(setting, image_seconds) -> float:
  """Images/s that a node's cores decode; 0: as many as it computes."""
  if setting.measured is not None and setting.device.kind == 'cpu':
    return 0.0  # its steps were timed with their input
  seconds = image_seconds or input_seconds(setting.config)
  cores = setting.device.host_cores * setting.cluster.devices
  return cores / seconds if seconds else 0.0


def input_seconds(config: ml_collections.ConfigDict) -> float:
  """Returns the seconds of a core that the input of an image takes; 0: next to none.

  Args:
    config: resolved config, whose files are not looked at.
  """
  data = config.data
  if data.source in _NO_DECODING:
    return 0.0
  if data.source == 'anp_shapes':
    return 1e-3 * _EMBEDDED * max(data.image_size / 48, 1)
  kind = 'mapped' if data.cache == 'mapped' else data.decode
  return 1e-3 * _PHOTOGRAPH[kind] * max((data.image_size / 224) ** 2, 0.25)


def last_that_pays(points: Sequence[Point]) -> tuple[Point | None, str]:
  """Returns the largest size whose further devices bring at least half of their own speed.

  Args:
    points: points of one strategy, the smallest first.

  Returns:
    The point, and what costs the next one most of its lost time, or that its batch is larger
    than an epoch; '' if all pay. Without a point if none runs or pays.
  """
  running = [p for p in points if p.runs]
  paying = [p for p in running if not p.repeats]
  for before, after in zip(paying, paying[1:]):
    more = after.cluster.size / before.cluster.size - 1
    if more > 0 and after.rate / before.rate - 1 < _PAYS * more:
      return before, LOSSES[binding(before, after)]
  last = paying[-1] if paying else None
  return last, _REPEATS if running and last is not running[-1] else ''


def binding(before: Point, after: Point) -> str:
  """Returns the part whose device-seconds per image grow most between two sizes."""

  def growth(name):
    first, second = (p.seconds[name] * p.cluster.size / p.batch for p in (before, after))
    return second - first

  return max(LOSSES, key=growth)
