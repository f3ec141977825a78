"""The tables of devices and links, and a user's entries."""

from collections.abc import Mapping
import dataclasses
import os
import re

from anp_jax import config as config_lib
from anp_jax.config import errors, rules
from anp_jax.costs import hardware
from anp_jax.tools import flag_values

_HERE = os.path.dirname(os.path.abspath(__file__))
_KINDS = ('tensor', 'vector', 'tpu', 'cpu')
_GROUPS = 'devices', 'links'
_MOST_PORTS = 64
_OPTIONS = 'topology', 'axes', 'is_shared'  # keys that a link may lack


@dataclasses.dataclass(frozen=True)
class Tables:
  """All devices and links by name; a link has one port."""

  devices: Mapping[str, hardware.Device]
  links: Mapping[str, hardware.Link]

  def device(self, name: str) -> hardware.Device:
    """The device of that name.

    Raises:
      ConfigError: with the nearest name there is.
    """
    errors.check_choice(f'--device={name!r}, a name of devices.toml', name, self.devices)
    return self.devices[name]

  def named_in(self, text: str) -> hardware.Device | None:
    """The device whose alias is found in a text, a user's own first; None: there is none."""
    for device in reversed(list(self.devices.values())):
      if device.aliases and re.search(device.aliases, text, re.IGNORECASE):
        return device
    return None

  def link(self, flag: str, text: str) -> hardware.Link:
    """The link of NAME, or NAMExPORTS.

    Raises:
      ConfigError: naming the flag, with the nearest name there is.
    """
    name, _, count = text.rpartition('x')
    if not (name and count.isdecimal()):
      name, count = text, '1'
    place = f'{flag}={text!r}, a NAME or NAMExPORTS of links.toml'
    errors.check_choice(place, name, self.links)
    if not 0 < int(count) <= _MOST_PORTS:
      raise config_lib.ConfigError(f'{flag}={text!r}: expected 1 to {_MOST_PORTS} ports')
    link = self.links[name]
    return dataclasses.replace(link, name=text, bandwidth=link.bandwidth * int(count))


def load(path: str = '') -> Tables:
  """Reads the tables, and a file of further entries, which take precedence.

  Args:
    path: path of a TOML file with [devices.NAME] and [links.NAME]; '': none.

  Raises:
    ConfigError: naming the file, the entry and the key at fault.
  """
  devices, links = {}, {}
  files = [os.path.join(_HERE, f) for f in ('devices.toml', 'links.toml')]
  for file in [*files, *([path] if path else ())]:
    content = _read(file)
    for name, entry in content.get('devices', {}).items():
      devices[name] = _device(file, name, entry)
    for name, entry in content.get('links', {}).items():
      links[name] = _link(file, name, entry)
  for device in devices.values():
    place = f'device {device.name!r}: node_link={device.node_link!r}'
    errors.check_choice(place, device.node_link, links)
  return Tables(devices, links)


def _read(file) -> dict:
  content = flag_values.tables(f'--entries={file!r}', file)
  for group, entries in content.items():
    errors.check_choice(f'--entries={file!r}: table {group!r}', group, _GROUPS)
    of_group = entries if isinstance(entries, dict) else {group: entries}
    for name, entry in of_group.items():
      if not isinstance(entry, dict):
        raise config_lib.ConfigError(
          f'--entries={file!r}: {name}={entry!r}: expected tables such as [{group}.mine]'
        )
  return content


def _check(where, entry, schema, optional) -> None:
  """Refuses an entry with a key that is unknown, wrong or missing."""
  for key, value in entry.items():
    if key not in schema:
      raise config_lib.ConfigError(
        f'{where} {key}={value!r}: unknown key{config_lib.nearest(key, schema)}'
      )
    expected, is_good = schema[key]
    if not is_good(value):
      raise config_lib.ConfigError(f'{where} {key}={value!r}: expected {expected}')
  missing = [key for key in schema if key not in entry and key not in optional]
  if missing:
    raise config_lib.ConfigError(f'{where} lacks {", ".join(missing)}')


def _device(file, name, entry) -> hardware.Device:
  _check(f'--entries={file!r}: [devices.{name}]', entry, _DEVICE, ('aliases',))
  return hardware.Device(name=name, **entry)


def _link(file, name, entry) -> hardware.Link:
  where = f'--entries={file!r}: [links.{name}]'
  _check(where, entry, _LINK, _OPTIONS)
  if re.search(r'x\d+$', name):
    raise config_lib.ConfigError(f'{where} ends like a number of ports')
  options = {key: entry[key] for key in _OPTIONS if key in entry}
  bandwidth, latency = entry['gigabytes_per_second'] * 1e9, entry['microseconds'] * 1e-6
  return hardware.Link(name, bandwidth, latency, **options)


def _is_positive(value) -> bool:
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  return is_number and 0 < value < float('inf')


def _are_peaks(value) -> bool:
  return isinstance(value, dict) and bool(value) and all(map(_is_positive, value.values()))


# What a key of an entry holds: the words for it, and whether a value is good.
_POSITIVE = 'a number above 0', _is_positive
_TEXT = 'a text', lambda value: isinstance(value, str)
_DEVICE = {
  'kind': (f'one of {", ".join(_KINDS)}', lambda value: value in _KINDS),
  'year': _POSITIVE,
  'tflops': ('a table of dtype = TFLOP/s, above 0', _are_peaks),
  'gigabytes': _POSITIVE,
  'gigabytes_per_second': _POSITIVE,
  'node_link': _TEXT,
  'host_cores': _POSITIVE,
  'source': _TEXT,
  'aliases': ('a regular expression', rules.is_pattern),
}
_LINK = {
  'gigabytes_per_second': _POSITIVE,
  'microseconds': _POSITIVE,
  'topology': ('ring or torus', lambda value: value in ('ring', 'torus')),
  'axes': ('2 or 3', lambda value: value in (2, 3)),
  'is_shared': ('true or false', lambda value: isinstance(value, bool)),
  'source': _TEXT,
}
