"""The keys of config.emulate: a sleep in place of computing, slower links."""

import re
from typing import Any

import ml_collections

from anp_jax.config import errors, rules
from anp_jax.config.keys import Key, flag, integer, number, value

_UNITS = {'kbit': 1e3, 'mbit': 1e6, 'gbit': 1e9}
_BANDWIDTH = re.compile(r'(?=[\d.]*[1-9])(\d+(?:\.\d+)?)(kbit|mbit|gbit)')
_SWITCH: dict[str, Any] = {'only_if': ('emulate.enabled', ('True',))}
# Keys of the sleep, which say nothing of a network that computes.
_SLEEP: dict[str, Any] = {'only_if': ('emulate.sleep', ('True',))}


def bytes_per_second(text: str) -> float:
  """Returns a bandwidth in bytes per second; 0 for ''.

  Args:
    text: bandwidth as tc writes it, such as '100mbit'.

  Raises:
    ValueError: for any other text.
  """
  if not text:
    return 0.0
  match = _BANDWIDTH.fullmatch(text)
  if not match:
    raise ValueError(text)
  return float(match[1]) * _UNITS[match[2]] / 8


def sleeps(config: ml_collections.ConfigDict) -> bool:
  """Returns whether a sleep replaces the network's computation."""
  return config.emulate.enabled and config.emulate.sleep


def _check_slow(key, pairs):
  example = '((3, 2.0),)'
  rules.check_pairs(key, pairs, example)
  good = all(
    type(process) is int and process >= 0 and rules.is_number(factor) and factor > 0
    for process, factor in pairs
  )
  errors.check(good, key, pairs, f'pairs such as {example}')


KEYS = {
  'enabled': flag(False, 'emulation of a cluster node by this process; see docs/study.md'),
  'sleep': flag(
    True, "sleep in place of the network's computation; False: emulate the links only", **_SWITCH
  ),
  'step_seconds': number(
    0.1,
    "seconds of a device's forward and backward pass, whatever its batch",
    at_least=0,
    resumable=True,
    **_SLEEP,
  ),
  'image_seconds': number(
    0, "seconds added per image of the device's batch", at_least=0, resumable=True, **_SLEEP
  ),
  'spread': number(
    0,
    "standard deviation of a pass's time over its mean (lognormal)",
    at_least=0,
    resumable=True,
    **_SLEEP,
  ),
  'slow': Key(
    (), 'slow-down factors, (process, factor) pairs', check=_check_slow, resumable=True, **_SLEEP
  ),
  'pieces': integer(
    4, 'pieces in which the backward pass releases its gradients', above=0, resumable=True, **_SLEEP
  ),
  'megabytes': number(
    0, "MB of parameters and of gradients; 0: those of the config's network", at_least=0, **_SLEEP
  ),
  'bandwidth': value(
    '',
    "bandwidth of each process's link, per direction, such as 100mbit; '': no limit",
    lambda text: not text or _BANDWIDTH.fullmatch(text),
    f"a bandwidth such as '100mbit', in {', '.join(_UNITS)}, or '' for no limit",
    resumable=True,
    **_SWITCH,
  ),
}
