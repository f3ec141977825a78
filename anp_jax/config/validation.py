"""Checks of a config: names, types, values; each error is one line."""

import ast
import math
import os
import re

from anp_jax import config as config_lib
from anp_jax.config import rules
from anp_jax.config import strategy as strategy_lib

SOURCES = (
  'anp_shapes', 'folder', 'tfds:NAME', 'arrays', 'digits', 'synthetic',
)  # fmt: skip
MODELS = (
  'resnet18', 'resnet34', 'resnet50', 'resnet101', 'resnet152', 'lenet',
  'cifar10_full', 'two_convolutions',
)  # fmt: skip
OPTIMIZERS = (
  'sgd', 'momentum', 'nesterov', 'rmsprop', 'adam', 'adamw', 'lars', 'lamb',
)  # fmt: skip
SCHEDULES = ('constant', 'cosine', 'step', 'exponential', 'polynomial')

_check = rules.check

# Of these keys, the values that are allowed (None: checked elsewhere).
_CHOICES = {
  'optimizer.name': OPTIMIZERS,
  'schedule.name': SCHEDULES,
  'strategy.outer': ('average', 'nesterov'),
  'strategy.moments': ('keep', 'average'),
  'strategy.reduce_dtype': ('float32', 'bfloat16', 'float64'),
  'strategy.station': ('device', 'host'),
  'strategy.mode': ('async', 'bounded', 'synchronous'),
  'strategy.compensation': ('none', 'staleness'),
  'strategy.wire_dtype': ('float32', 'bfloat16'),
  'model.dtype': ('float32', 'bfloat16', 'float64'),
  'model.param_dtype': ('float32', 'float64'),
  'model.version': ('v1.5', 'v1'),
  'model.head': ('joint', 'multitask', 'factored'),
  'data.pairs': ('auto', 'yes', 'no'),
  'data.augment': ('crop', 'scale', 'none'),
  'data.decode': ('fast', 'exact', 'bilinear', 'bicubic'),
  'data.balance': ('none', 'sample', 'weights'),
  'data.cache': ('none', 'encoded', 'decoded'),
  'checkpoint.on_error': ('stop', 'continue'),
  'log.wandb': ('', 'offline', 'online'),
  'checkpoint.best_metric': (
    'anp_top1', 'anp_top5', 'anp_top10', 'adjective_top1', 'noun_top1', 'loss',
    'class_top1', 'class_top5', 'class_top10',
  ),
}  # fmt: skip
_POSITIVE = (
  'data.image_size',
  'data.resize',
  'data.synthetic_examples',
  'data.synthetic_classes',
  'data.prefetch',
  'model.width',
  'accumulate',
  'eval.batch_size',
  'optimizer.epsilon',
  'schedule.factor',
  'schedule.power',
  'strategy.bucket_megabytes',
  'strategy.groups',
  'strategy.period',
  'strategy.outer_learning_rate',
  'checkpoint.keep',
  'cluster.rendezvous_timeout',
  'strategy.servers',
  'strategy.lanes',
  'strategy.ticket_timeout',
)
_NOT_NEGATIVE = (
  'seed',
  'batch_size',
  'batch_size_per_device',
  'model.norm_group',
  'data.mixup',
  'data.cutmix',
  'data.threads',
  'data.cache_gigabytes',
  'checkpoint.keep_best',
  'optimizer.learning_rate',
  'optimizer.weight_decay',
  'optimizer.clip_norm',
  'optimizer.clip_value',
  'compile_cache.max_gigabytes',
  'cluster.stall_timeout',
  'cluster.stop_timeout',
  'time_limit',
  'strategy.max_staleness',
  'strategy.backup_workers',
  'strategy.weight_prediction',
  'strategy.at_once',
  'strategy.halving',
)
_FRACTIONS = (
  'label_smoothing',
  'ema',
  'strategy.exchange_probability',
  'schedule.end',
  'model.norm_momentum',
  'data.flip',
  'data.max_damaged',
)
# At 1 these forget nothing: sums grow for ever, and Adam's divide by 0.
_BELOW_ONE = (
  'optimizer.momentum',
  'optimizer.decay',
  'optimizer.beta1',
  'optimizer.beta2',
  'strategy.outer_momentum',
)
_DURATIONS = (
  'duration',
  'schedule.warmup',
  'schedule.every',
  'eval.every',
  'checkpoint.every',
  'log.every',
)


def validate(config) -> None:
  """Checks names, types and values against `base()`.

  Raises:
    ConfigError: naming the key, the value and what was expected.
  """
  known = config_lib.flat(config_lib.base())
  have = config_lib.flat(config)
  for key in have:
    if key not in known:
      raise config_lib.ConfigError(
        f'unknown key config.{key}{config_lib.nearest(key, known)}'
      )
  for key, default in known.items():
    if key not in have:
      raise config_lib.ConfigError(
        f'config.{key} is missing (default: {default!r})'
      )
    check_type(key, have[key], default)
  for key, choices in _CHOICES.items():
    if have[key] not in choices:
      names = ', '.join(c or "''" for c in choices)
      raise config_lib.ConfigError(
        f'config.{key}={have[key]!r}: expected one of {names}'
        f'{config_lib.nearest(have[key], choices)}'
      )
  for key in _POSITIVE:
    _check(have[key] > 0, key, have[key], 'a number above 0')
  for key in _NOT_NEGATIVE:
    _check(have[key] >= 0, key, have[key], '0 or more')
  for key in _FRACTIONS:
    _check(0 <= have[key] <= 1, key, have[key], 'a number from 0 to 1')
  for key in _BELOW_ONE:
    _check(0 <= have[key] < 1, key, have[key], 'a number from 0, below 1')
  for key in _DURATIONS:
    try:
      count = config_lib.steps(have[key], 1, 1)
    except config_lib.ConfigError as e:
      raise config_lib.ConfigError(f'config.{key}={e}') from None
    if key != 'schedule.warmup':
      _check(count > 0, key, have[key], 'more than nothing')
  try:
    config_lib.window(have['profile.steps'])
  except config_lib.ConfigError as e:
    raise config_lib.ConfigError(f'config.profile.steps={e}') from None
  # Signs of life come once a second.
  _check(have['cluster.heartbeat_timeout'] >= 3, 'cluster.heartbeat_timeout',
         have['cluster.heartbeat_timeout'], '3 seconds or more')  # fmt: skip
  # A JAX key is made of 32 bits, of which one is the sign's.
  _check(have['seed'] < 2**31, 'seed', have['seed'], 'below 2**31')
  shards = have['strategy.logical_shards']
  _check(
    shards >= 2 and not shards & (shards - 1), 'strategy.logical_shards',
    shards, 'a power of two, 2 or more',
  )  # fmt: skip
  threads = have['strategy.threads']
  _check(0 < threads <= 4096, 'strategy.threads', threads, '1 to 4096')
  _validate_data(have)
  rules.examples(have)
  rules.sharding(have['sharding'])
  rules.multipliers(have['optimizer.multipliers'])
  strategy_lib.by_name(have['strategy.name']).check(have)
  for key in ('mesh.data', 'mesh.model'):
    _check(
      have[key] == -1 or have[key] > 0, key, have[key], 'a count of devices, '
      'or -1 for all that remain',
    )  # fmt: skip
  _check(
    have['batch_size'] or have['batch_size_per_device'],
    'batch_size', 0, 'above 0 where batch_size_per_device is 0',
  )  # fmt: skip
  kernels = have['model.kernels']
  _check(
    len(kernels) == 2 and all(type(k) is int and k > 0 for k in kernels),
    'model.kernels', kernels, 'two whole numbers above 0',
  )  # fmt: skip
  weights = have['model.head_weights']
  _check(
    len(weights) == 3
    and all(type(w) in (int, float) and 0 <= w < math.inf for w in weights)
    and weights[0] > 0,
    'model.head_weights', weights,
    'three numbers, of which the first is above 0 and none below',
  )  # fmt: skip
  name = have['model.name']
  if ':' not in name and name not in MODELS:
    raise config_lib.ConfigError(
      f'config.model.name={name!r}: expected one of {", ".join(MODELS)} or '
      f'package.module:Class{config_lib.nearest(name, MODELS)}'
    )


def override(config, key: str, text: str) -> None:
  """Sets one dotted key from the text typed for it.

  Raises:
    ConfigError: naming the key, with the nearest valid one.
  """
  known = config_lib.flat(config)
  if key not in known:
    groups = sorted({k.rpartition('.')[0] for k in known} - {''})
    if key in groups:
      raise config_lib.ConfigError(
        f'config.{key} is a group; its keys are '
        + ', '.join(k for k in known if k.startswith(key + '.'))
      )
    raise config_lib.ConfigError(
      f'unknown key config.{key}{config_lib.nearest(key, known)}'
    )
  default = known[key]
  value = text
  if not isinstance(default, str):
    try:
      value = ast.literal_eval(text.strip().capitalize() if isinstance(
        default, bool) else text)  # fmt: skip
    except (ValueError, SyntaxError):
      raise config_lib.ConfigError(expected(key, text, default)) from None
    if isinstance(default, tuple) and isinstance(value, list):
      value = tuple(value)
  if type(default) is float and type(value) is int:
    value = float(value)
  check_type(key, value, default)
  config_lib.put(config, key, value)


def expected(key, value, default) -> str:
  """The error line for a value that is not of its default's type."""
  kind = {
    bool: 'True or False',
    int: 'a whole number',
    float: 'a number',
    str: 'a text',
    tuple: f'a tuple like {default!r}',
  }[type(default)]
  return f'config.{key}={value!r}: expected {kind}'


def check_type(key, value, default) -> None:
  """Refuses a value of another type than its default, and NaN."""
  good = type(value) is type(default) or (
    type(default) is float and type(value) is int
  )
  if not good or (type(value) is float and not math.isfinite(value)):
    raise config_lib.ConfigError(expected(key, value, default))


def _validate_data(have) -> None:
  source = have['data.source']
  names = [s for s in SOURCES if s != 'tfds:NAME']
  if source not in names and not re.fullmatch(r'tfds:\S+', source):
    raise config_lib.ConfigError(
      f'config.data.source={source!r}: expected one of {", ".join(SOURCES)}'
      f'{config_lib.nearest(source, SOURCES)}'
    )
  if source in ('folder', 'arrays'):
    path = have['data.path']
    _check(path, 'data.path', path, f'the path of the {source}')
    _check(os.path.exists(os.path.expanduser(path)), 'data.path', path,
           'a path that exists')  # fmt: skip
  lists = have['data.lists']
  _check(not lists or source == 'folder', 'data.lists', lists,
         "nothing where data.source is not 'folder'")  # fmt: skip
  _check(have['data.pairs'] != 'no' or ',' not in lists, 'data.pairs', 'no',
         'auto or yes where data.lists has adjectives and nouns')  # fmt: skip
  for name in filter(None, (part.strip() for part in lists.split(','))):
    _check(os.path.isfile(os.path.expanduser(name)), 'data.lists', lists,
           'files of names, one a line, but there is no '
           f'{name!r}')  # fmt: skip
  for key, count in (
    ('crop_area', 2), ('crop_ratio', 2), ('scale_range', 2), ('mean', 3),
    ('std', 3),
  ):  # fmt: skip
    value = have[f'data.{key}']
    good = len(value) == count and all(
      isinstance(v, int | float) and (v > 0 or key == 'mean') for v in value
    )
    _check(good, f'data.{key}', value, f'{count} numbers above 0')
    if count == 2:
      _check(value[0] <= value[1], f'data.{key}', value, 'low before high')
  _check(have['data.crop_area'][1] <= 1, 'data.crop_area',
         have['data.crop_area'], 'shares of the image, at most 1')  # fmt: skip
  most = config_lib.MOST_MEGAPIXELS
  _check(0 < have['data.max_megapixels'] <= most, 'data.max_megapixels',
         have['data.max_megapixels'], f'above 0, at most {most}')  # fmt: skip
  _check(have['data.resize'] >= have['data.image_size'], 'data.resize',
         have['data.resize'], 'at least data.image_size')  # fmt: skip
  if have['data.augment'] == 'scale':
    _check(have['data.scale_range'][0] >= have['data.image_size'],
           'data.scale_range', have['data.scale_range'],
           'at least data.image_size')  # fmt: skip
