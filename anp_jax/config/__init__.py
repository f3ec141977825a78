"""Configs: keys with defaults and ranges, recipes, what is typed.

Nothing heavy is imported here: a typing mistake is answered in well under a
second. A config file is Python with `get_config(variant='') -> ConfigDict`; it
starts from `base()` and says only what differs.
"""

import os

from anp_jax.config.data_keys import MOST_MEGAPIXELS
from anp_jax.config.durations import milestones
from anp_jax.config.durations import steps
from anp_jax.config.durations import window
from anp_jax.config.errors import ConfigError
from anp_jax.config.errors import nearest
from anp_jax.config.resolve import base
from anp_jax.config.resolve import completed
from anp_jax.config.resolve import flat
from anp_jax.config.resolve import from_flat
from anp_jax.config.resolve import golden
from anp_jax.config.resolve import known_keys
from anp_jax.config.resolve import replaced
from anp_jax.config.resolve import resolved
from anp_jax.config.resolve import to_json
from anp_jax.config.resolve import variant
from anp_jax.config.resume import changeable
from anp_jax.config.resume import changed
from anp_jax.config.resume import changes
from anp_jax.config.resume import difference
from anp_jax.config.resume import resumable

__all__ = [
  'MOST_MEGAPIXELS', 'ConfigError', 'base', 'cache_dir', 'changeable',
  'changed', 'changes', 'completed', 'data_dir', 'difference', 'flat',
  'from_flat', 'golden', 'known_keys', 'milestones', 'nearest',
  'replaced', 'resolved', 'resumable', 'steps', 'to_json', 'variant', 'window',
]  # fmt: skip


def cache_dir() -> str:
  """Returns the folder for what can be made again: data sets, programs."""
  root = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  return os.path.join(root, 'anp_jax')


def data_dir(config) -> str:
  """Returns where data sets live: config.data.dir, $ANP_DATA, a cache."""
  chosen = config.data.dir or os.environ.get('ANP_DATA')
  return os.path.expanduser(chosen or os.path.join(cache_dir(), 'data'))
