"""Configs: keys with defaults and ranges, recipes, the command line.

Nothing heavy is imported here: a mistyped flag is refused in well under a second.
A config file is Python with `get_config(variant='') -> ConfigDict`; it starts from
`base()` and says only what differs.
"""

import os

import ml_collections

from anp_jax.config.data_keys import MOST_MEGAPIXELS, example
from anp_jax.config.durations import milestones, steps, window
from anp_jax.config.errors import ConfigError, nearest, printable
from anp_jax.config.resolve import (
  base,
  completed,
  flat,
  from_flat,
  known_keys,
  replaced,
  resolved,
  to_json,
  to_text,
  variant,
)
from anp_jax.config.resume import changeable, changed, changes, difference, resumable


def cache_dir() -> str:
  """Returns the folder of data sets and compiled programs, which can be rebuilt."""
  root = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  return os.path.join(root, 'anp_jax')


def data_dir(config: ml_collections.ConfigDict) -> str:
  """Returns the folder of data sets: config.data.dir, $ANP_DATA, or a cache."""
  chosen = config.data.dir or os.environ.get('ANP_DATA')
  return os.path.expanduser(chosen or os.path.join(cache_dir(), 'data'))
