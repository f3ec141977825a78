"""Published training rates of ResNet-50, as what the planner predicts."""

from collections.abc import Callable
import csv
import dataclasses
import functools
import math
import os
import re

from anp_jax import config as config_lib
from anp_jax.config import command_line, errors, recipes
from anp_jax.costs import collectives, device_step, hardware, work
from anp_jax.tools.plan import plan_tables, workload as workload_lib

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
_ETHERNET = re.compile(r'([\d.]+)(?:-([\d.]+))? ?(?:Gbit/s|GbE|Gbps)')
# What trained: code that a vendor tuned for a benchmark, this package, or a framework
# as it is. The first two are named in a row's system or source.
OWN_SOFTWARE = 'anp_jax'
_NAMED = {OWN_SOFTWARE: 'anp_jax', 'tuned': 'MLPerf|MXNet'}
SOFTWARE = (*_NAMED, 'framework')
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
def _buckets(dtype: str) -> tuple[tuple[float, float], ...]:
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

  @property
  def workload(self) -> work.Workload:
    """What a step costs."""
    return resnet50(self.dtype)

  @property
  def buckets(self) -> tuple[tuple[float, float], ...]:
    """Buckets of gradients, from `device_step.buckets`."""
    return _buckets(self.dtype)


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


def _row(known_tables, shipped, record, place) -> Row:
  values = {}
  for name, kind in _COLUMNS.items():
    try:
      values[name] = kind(record[name])
      if kind is not str and not 0 < values[name] < math.inf:
        raise ValueError
    except (KeyError, TypeError, ValueError):
      raise config_lib.ConfigError(
        f'{place}: {name}={record.get(name)!r}, expected '
        f'{"a text" if kind is str else "a number above 0"}'
      ) from None
  errors.check_choice(f'{place}: dtype={values["dtype"]!r}', values['dtype'], _DTYPES)
  system, network = values['system'], values['network']
  # A user's own alias takes no published rate away from the device that it names.
  device = shipped.named_in(system) or known_tables.named_in(system)
  if device is None:
    raise config_lib.ConfigError(
      f'{place}: system {system!r}: no device of the tables is named in it'
      f'{config_lib.nearest(system, known_tables.devices)}'
    )
  nodes = -(-values['devices'] // values['devices_per_node'])
  if values['devices'] % nodes:
    raise config_lib.ConfigError(
      f'{place}: devices={values["devices"]}, expected as many on each of {nodes} nodes'
    )
  text = f'{system} {values["source"]}'
  software = [name for name, pattern in _NAMED.items() if re.search(pattern, text, re.IGNORECASE)]
  has_servers = 'parameter server' in network
  return Row(
    system=system,
    device=device,
    cluster=collectives.Cluster(
      nodes, values['devices'] // nodes, *_links(known_tables, device, network, nodes, place)
    ),
    images=values['images_per_device'],
    dtype=values['dtype'],
    rate=values['images_per_second'],
    source=values['source'],
    software=[*software, 'framework'][0],
    collective=collectives.parameter_servers if has_servers else collectives.all_reduce,
  )


def _links(known_tables, device, network, nodes, place) -> tuple[hardware.Link, hardware.Link]:
  """The link between devices of a node, and that between nodes with all ports of a node."""
  parts = [part.strip() for part in network.split(';') if 'server' not in part]
  within, *between = parts or ['']
  place = f'{place}: network={network!r}'
  pcie = re.match(r'PCIe ?(\d)', within)
  node_link = known_tables.link(f'{place}: link', f'pcie{pcie[1]}' if pcie else device.node_link)
  ports = [_ports(known_tables, part, f'{place}: link') for part in (within, *between)]
  # What joins one node's devices needs no name: the device's entry has it.
  unknown = [part for part, link in zip(between, ports[1:]) if link is None]
  if nodes > 1 and node_link.topology != 'torus' and not any(ports):
    unknown.append(within)
  for part in unknown:
    name = _counted(part)[1].partition(' ')[0].lower()
    where = f'{place}: {part!r}, a link of links.toml such as 8x NDR400 or 25 GbE'
    errors.check_choice(where, name, known_tables.links)
  links = [link for link in ports if link]
  return node_link, links[0] if links else known_tables.links['eth-10']


def _ports(known_tables, text, place) -> hardware.Link | None:
  """The link that a text names, with its ports; None if it names none."""
  count, words = _counted(text)
  if re.sub(r'x\d+$', '', words) in known_tables.links:
    return known_tables.link(place, f'{words}x{count}' if count > 1 else words)
  for link in known_tables.links.values():
    if link.aliases and re.search(link.aliases, words, re.IGNORECASE):
      return known_tables.link(place, f'{link.name}x{count}')
  if match := _ETHERNET.search(words):
    rates = [float(rate) for rate in match.groups() if rate]
    mean = count * sum(rates) / len(rates)
    slow = known_tables.links['eth-10']
    return dataclasses.replace(slow, name=f'eth-{mean:g}', bandwidth=mean * 1e9 / 8)
  return None


def _counted(text) -> tuple[int, str]:
  """The number of ports that begins a text, or one, and the rest."""
  count, _, rest = text.partition('x ')
  return (int(count), rest) if count.isdecimal() else (1, text)
