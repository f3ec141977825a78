"""Published training rates of ResNet-50, as what the planner predicts."""

from collections.abc import Callable
import csv
import dataclasses
import os
import re

from anp_jax import config as config_lib
from anp_jax.costs import collectives, device_step, hardware, work
from anp_jax.tools import flag_values
from anp_jax.tools.plan import plan_tables

FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'published.csv')
_COLUMNS = {
  'system': str,
  'network': str,
  'devices': int,
  'devices_per_node': int,
  'images_per_device': int,
  'dtype': str,
  'images_per_second': float,
  'source': str,
}
_DTYPES = 'bfloat16', 'float16', 'float32'
# What submissions send at once; frameworks differ, and no table says it.
_BUCKET_MEGABYTES = 25
# Names in the column 'network' of a node's ports: pattern, link, ports.
_PORTS = (
  (r'(\d+)x EDR', 'ib-edr100'),
  (r'(\d+)x HDR', 'ib-hdr200'),
  (r'(\d+)x NDR', 'ib-ndr400'),
  (r'(\d+)x FDR', 'ib-fdr56'),
)
_ETHERNET = re.compile(r'(?:(\d+)x )?([\d.]+)(?:-([\d.]+))? ?(?:Gbit/s|GbE|Gbps)')


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
    collective: function from (cluster, bytes) to the seconds of summing gradients.
  """

  system: str
  device: hardware.Device
  cluster: collectives.Cluster
  images: int
  dtype: str
  rate: float
  source: str
  collective: Callable = collectives.all_reduce

  @property
  def seconds(self) -> float:
    """Seconds of a step."""
    return self.images * self.cluster.size / self.rate


def read(known_tables: plan_tables.Tables, path: str = FILE) -> list[Row]:
  """Reads published rates.

  Args:
    known_tables: devices and links.
    path: path of a CSV file with the columns of published.csv.

  Raises:
    ConfigError: naming the file, the line and the value at fault.
  """
  rows, shipped = [], plan_tables.load()
  try:
    with open(path, encoding='utf-8', newline='') as f:
      reader = csv.DictReader(f)
      for record in reader:
        place = f'--rows={path!r}, line {reader.line_num}'
        rows.append(_row(known_tables, shipped, record, place))
  except OSError as e:
    raise config_lib.ConfigError(f'--rows={path!r}: {e.strerror}') from e
  except (UnicodeDecodeError, csv.Error) as e:
    raise config_lib.ConfigError(f'--rows={path!r}: expected a CSV file in UTF-8 ({e})') from e
  if not rows:
    raise config_lib.ConfigError(f'--rows={path!r}: it has no rows')
  return rows


def gradient_buckets(row: Row, workload: work.Workload) -> tuple[tuple[float, float], ...]:
  """Returns the buckets in which a published run is assumed to send its gradients.

  Half precision is sent in half precision, as the submissions' code does.
  """
  return device_step.buckets(workload, device_step.width(row.dtype), _BUCKET_MEGABYTES)


def _row(known_tables, shipped, record, place) -> Row:
  values = {}
  for name, kind in _COLUMNS.items():
    try:
      values[name] = kind(record[name])
      if kind is not str and values[name] <= 0:
        raise ValueError
    except (KeyError, TypeError, ValueError):
      raise config_lib.ConfigError(
        f'{place}: {name}={record.get(name)!r}, expected '
        f'{"a text" if kind is str else "a number above 0"}'
      ) from None
  flag_values.check_choice(f'{place}: dtype={values["dtype"]!r}', values['dtype'], _DTYPES)
  system, network = values['system'], values['network']
  # A user's own alias takes no published rate away from the device that it names.
  device = shipped.named_in(system) or known_tables.named_in(system)
  if device is None:
    raise config_lib.ConfigError(
      f'{place}: system {system!r}: no device of the tables is named in it'
      f'{config_lib.nearest(system, known_tables.devices)}'
    )
  pcie = re.match(r'PCIe ?(\d)', network)
  node_link = f'pcie{pcie[1]}' if pcie else device.node_link
  where = f'{place}: network={network!r}: link {node_link!r}'
  flag_values.check_choice(where, node_link, known_tables.links)
  nodes = -(-values['devices'] // values['devices_per_node'])
  links = known_tables.links[node_link], _link(known_tables, network)
  has_servers = 'parameter server' in network
  return Row(
    system=system,
    device=device,
    cluster=collectives.Cluster(nodes, values['devices'] // nodes, *links),
    images=values['images_per_device'],
    dtype=values['dtype'],
    rate=values['images_per_second'],
    source=values['source'],
    collective=collectives.parameter_servers if has_servers else collectives.all_reduce,
  )


def _link(known_tables, network) -> hardware.Link:
  """The link between nodes, with all ports of a node."""
  for pattern, name in _PORTS:
    if match := re.search(pattern, network):
      return known_tables.link('network', f'{name}x{match[1]}')
  slow = known_tables.links['eth-10']
  if match := _ETHERNET.search(network):
    ports, *texts = match.groups()
    rates = [float(text) for text in texts if text]
    mean = int(ports or 1) * sum(rates) / len(rates)
    return dataclasses.replace(slow, name=f'eth-{mean:g}', bandwidth=mean * 1e9 / 8)
  return slow  # of one node, which sends nothing
