"""What is known of devices and links: the tables, and entries of a user."""

from collections.abc import Mapping
import dataclasses
import os
import re
import tomllib

from anp_jax import config as config_lib
from anp_jax.costs import hardware

_HERE = os.path.dirname(os.path.abspath(__file__))
_KINDS = ('tensor', 'vector', 'tpu', 'cpu')
_TOPOLOGIES = ('ring', 'torus')
_MOST_PORTS = 64


@dataclasses.dataclass(frozen=True)
class Tables:
  """All devices and links by name; links of one port."""

  devices: Mapping[str, hardware.Device]
  links: Mapping[str, hardware.Link]

  def device(self, name: str) -> hardware.Device:
    """The device of that name.

    Raises:
      ConfigError: with the nearest name there is.
    """
    if name not in self.devices:
      raise config_lib.ConfigError(
        f'--device={name!r}: expected one of {", ".join(self.devices)}'
        f'{config_lib.nearest(name, self.devices)}'
      )
    return self.devices[name]

  def link(self, flag: str, text: str) -> hardware.Link:
    """The link of NAME, or NAMExPORTS.

    Raises:
      ConfigError: naming the flag, with the nearest name there is.
    """
    name, _, count = text.rpartition('x')
    if not (name and count.isdecimal()):
      name, count = text, '1'
    if name not in self.links:
      raise config_lib.ConfigError(
        f'{flag}={text!r}: expected NAME or NAMExPORTS with a name of '
        f'{", ".join(self.links)}{config_lib.nearest(name, self.links)}'
      )
    if not 0 < int(count) <= _MOST_PORTS:
      raise config_lib.ConfigError(f'{flag}={text!r}: expected 1 to {_MOST_PORTS} ports')
    link = self.links[name]
    return dataclasses.replace(link, name=text, bandwidth=link.bandwidth * int(count))


def load(path: str = '') -> Tables:
  """Reads the tables, and a file of further entries, which take precedence.

  Args:
    path: of a TOML file with [devices.NAME] and [links.NAME]; '': none.

  Raises:
    ConfigError: naming the file, the entry and the key at fault.
  """
  devices, links = {}, {}
  files = [os.path.join(_HERE, f) for f in ('devices.toml', 'links.toml')]
  for file in [*files, *([path] if path else ())]:
    content = _read(file)
    for group, entries in content.items():
      for name, entry in entries.items():
        if not isinstance(entry, dict):
          raise config_lib.ConfigError(
            f'--entries={file!r}: [{group}] {name}={entry!r}: expected a table [{group}.{name}]'
          )
    for name, entry in content.get('devices', {}).items():
      devices[name] = _entry(hardware.Device, file, f'devices.{name}', entry, name)
    for name, entry in content.get('links', {}).items():
      links[name] = _link(file, name, entry)
  for device in devices.values():
    if device.node_link not in links:
      raise config_lib.ConfigError(
        f'device {device.name!r}: node_link={device.node_link!r} is no link'
        f'{config_lib.nearest(device.node_link, links)}'
      )
  return Tables(devices, links)


def _read(file) -> dict:
  try:
    with open(file, 'rb') as f:
      content = tomllib.load(f)
  except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
    raise config_lib.ConfigError(f'--entries={file!r}: {e}') from e
  groups = ('devices', 'links')
  for name in content:
    if name not in groups:
      raise config_lib.ConfigError(
        f'--entries={file!r}: unknown table {name!r}, expected devices or links'
        f'{config_lib.nearest(name, groups)}'
      )
    if not isinstance(content[name], dict):
      raise config_lib.ConfigError(
        f'--entries={file!r}: {name}={content[name]!r}: expected tables such as [{name}.mine]'
      )
  return content


def _entry(cls, file, place, entry, name):
  """Makes a hardware.Device; every key is checked."""
  fields = {f.name: f for f in dataclasses.fields(cls) if f.name != 'name'}
  for key, value in entry.items():
    where = f'--entries={file!r}: [{place}] {key}={value!r}'
    if key not in fields:
      raise config_lib.ConfigError(f'{where}: unknown key{config_lib.nearest(key, fields)}')
    if key == 'tflops':
      rates = value.values() if isinstance(value, dict) else ()
      if not rates or not all(_is_positive(r) for r in rates):
        raise config_lib.ConfigError(f'{where}: expected a table of dtype = TFLOP/s, above 0')
    elif key in ('kind', 'node_link', 'source', 'aliases'):
      if not isinstance(value, str):
        raise config_lib.ConfigError(f'{where}: expected a text')
      if key == 'aliases' and not _is_expression(value):
        raise config_lib.ConfigError(f'{where}: no regular expression')
    elif not _is_positive(value):
      raise config_lib.ConfigError(f'{where}: expected a number above 0')
  missing = [
    key
    for key, field in fields.items()
    if field.default is dataclasses.MISSING and key not in entry
  ]
  if missing:
    raise config_lib.ConfigError(f'--entries={file!r}: [{place}] lacks {", ".join(missing)}')
  if entry['kind'] not in _KINDS:
    raise config_lib.ConfigError(
      f'--entries={file!r}: [{place}] kind={entry["kind"]!r}: expected one of '
      f'{", ".join(_KINDS)}{config_lib.nearest(entry["kind"], _KINDS)}'
    )
  return cls(name=name, **entry)


def _link(file, name, entry) -> hardware.Link:
  keys = {
    'gigabytes_per_second': _is_positive,
    'microseconds': _is_positive,
    'topology': lambda v: v in _TOPOLOGIES,
    'axes': lambda v: v in (2, 3),
    'is_shared': lambda v: isinstance(v, bool),
    'source': lambda v: isinstance(v, str),
  }
  for key, value in entry.items():
    where = f'--entries={file!r}: [links.{name}] {key}={value!r}'
    if key not in keys:
      raise config_lib.ConfigError(f'{where}: unknown key{config_lib.nearest(key, keys)}')
    if not keys[key](value):
      raise config_lib.ConfigError(f'{where}: out of range; see links.toml')
  missing = [k for k in (*list(keys)[:2], 'source') if k not in entry]
  if missing or re.search(r'x\d+$', name):
    reason = f'lacks {", ".join(missing)}' if missing else 'ends like a count'
    raise config_lib.ConfigError(f'--entries={file!r}: [links.{name}] {reason}')
  return hardware.Link(
    name=name,
    bandwidth=entry['gigabytes_per_second'] * 1e9,
    latency=entry['microseconds'] * 1e-6,
    topology=entry.get('topology', 'ring'),
    axes=entry.get('axes', 2),
    is_shared=entry.get('is_shared', False),
  )


def _is_expression(text) -> bool:
  try:
    re.compile(text)
  except re.error:
    return False
  return True


def _is_positive(value) -> bool:
  is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
  return is_number and 0 < value < float('inf')
