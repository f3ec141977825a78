"""Published training rates of ResNet-50, as what the planner predicts."""

from collections.abc import Callable
import csv
import dataclasses
import functools
import os

from anp_jax.config import command_line, errors, recipes
from anp_jax.costs import collectives, device_step, hardware, work
from anp_jax.system import error_lines
from anp_jax.tools.plan import plan_tables, workload as workload_lib

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'published.csv')
_NO_LINK = 'eth-10'  # of systems of one node, and of those whose devices' own links join nodes
# What submissions send at once; frameworks differ, and no table says it.
_BUCKET_MEGABYTES = 25
# What trained: this package, code that a vendor tuned for a benchmark, or a framework
# as it is.
OWN_SOFTWARE = 'anp_jax'
SOFTWARE = (OWN_SOFTWARE, 'tuned', 'framework')
# ImageNet's 1,281,167 training images of 1,000 classes, at 224 px.
_EXAMPLES, _CLASSES = 1281167, 1000


@functools.cache
def resnet50(dtype: str) -> work.Workload:
  """The workload of the published rows.

  Args:
    dtype: 'float32', 'float16' or 'bfloat16'; the latter two cost the same.
  """
  recipe = f'{recipes.shipped() / "resnet_anp.py"}:modern'
  is_half = dtype in ('float16', 'bfloat16')
  config = command_line.load(
    recipe,
    {'model.dtype': 'bfloat16' if is_half else dtype, 'ema': '0', 'data.source': 'synthetic'},
  )
  workload = workload_lib.count(config, _EXAMPLES, _CLASSES)
  return dataclasses.replace(workload, dtype=dtype)


@functools.cache
def buckets(dtype: str) -> tuple[tuple[float, float], ...]:
  """The buckets in which a published run is assumed to send its gradients.

  Half precision is sent in half precision, as the submissions' code does.
  """
  return device_step.buckets(resnet50(dtype), device_step.width(dtype), _BUCKET_MEGABYTES)


@dataclasses.dataclass(frozen=True)
class Row:
  """One published rate, and what it was measured on.

  Attributes:
    system: name of the machine and its software.
    device: device of the tables.
    cluster: nodes and links.
    images: images per step and device.
    dtype: dtype of the computation.
    rate: images/s of all devices.
    source: where it was published.
    software: one of SOFTWARE.
    collective: function from (cluster, bytes) to the seconds of summing gradients.
  """

  system: str
  device: hardware.Device
  cluster: collectives.Cluster
  images: int
  dtype: str
  rate: float
  source: str
  software: str
  collective: Callable = collectives.all_reduce

  @property
  def seconds(self) -> float:
    """Seconds of a step."""
    return self.images * self.cluster.size / self.rate


def read() -> list[Row]:
  """Reads published.csv, whose devices and links are those of the shipped tables.

  Raises:
    ConfigError: naming the line at fault.
  """
  tables, rows = plan_tables.load(), []
  with open(FILE, encoding='utf-8', newline='') as f:
    reader = csv.DictReader(f)
    for record in reader:
      try:
        rows.append(_row(tables, record))
      except (KeyError, TypeError, ValueError, errors.ConfigError) as e:
        place = f'{FILE}, line {reader.line_num}'
        raise errors.ConfigError(f'{place}: {error_lines.typed_line(e)}') from e
  return rows


def _row(tables, record) -> Row:
  devices = int(record['devices'])
  nodes = -(-devices // int(record['devices_per_node']))
  device = tables.device(record['device'])
  node_link = tables.links[device.node_link]
  errors.check_choice(f'software={record["software"]!r}', record['software'], SOFTWARE)
  link = tables.link('link', record['link'] or _NO_LINK)
  return Row(
    system=record['system'],
    device=device,
    cluster=collectives.Cluster(nodes, devices // nodes, node_link, link),
    images=int(record['images_per_device']),
    dtype=record['dtype'],
    rate=float(record['images_per_second']),
    source=record['source'],
    software=record['software'],
    collective=collectives.parameter_servers if record['servers'] else collectives.all_reduce,
  )
