"""Optimizers and learning-rate schedules from the config, through optax.

A gradient goes through these effects, in this order:

1. `optimizer.clip_value`: each element to at most this magnitude.
2. `optimizer.clip_norm`: the whole gradient to at most this global norm.
3. `optimizer.weight_decay` times the weights, times a factor of
   `optimizer.decay_multipliers` by rules, is added to the gradient (L2, so the
   decay is not clipped but does pass through momentum and scaling). A function
   with an argument `weight_decay` applies it itself: adamw and lion next to the
   scaled gradient, lars before and lamb within the trust ratio.
4. The optimizer's direction.
5. The learning rate. rmsprop and lars apply momentum after it, as their
   authors did, so that a decay of the rate takes time to be felt.
6. `optimizer.multipliers` and `layer_decay`: a factor of the whole update of a
   parameter, hence of its learning rate; 0 freezes it, see `multipliers`.

Weight decay and trust ratios act on leaves of two or more dimensions only:
biases and the scales of norm layers are vectors. The rank decides, not the name,
so a matrix with another name than `kernel` decays too, and parameters must be
whole: raveled or stacked ones change rank.
"""

from collections.abc import Callable
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np
import optax

from anp_jax import config as config_lib
from anp_jax.config import errors, key_table, optimizers, trust
from anp_jax.training import multipliers


def schedule(config: ConfigDict, batch_size: int, examples: int, total_steps: int) -> Callable:
  """The learning rate as a closed form of the step.

  With peak p, warm-up w and total t steps, and d = clip((s - w) / (t - w)):
    constant:    p
    cosine:      p (end + (1 - end) (1 + cos(pi d)) / 2)
    polynomial:  p (end + (1 - end) (1 - d)^power)
    range:       p start^(1 - d), the range test of Smith (2015), arXiv
      1506.01186, with equal ratios
    step, exponential: p factor^floor(s / every), one staircase under its two usual
      names; decays are counted from step 0, not from w. If schedule.every has
      several durations, p factor^n from the n-th on.
    package.module:function: p function(d), of a NumPy or JAX array
  Each is multiplied by min(1, s / w).

  Args:
    config: resolved config; `optimizer.learning_rate` and `schedule.*` are read.
    batch_size: images per step over all devices.
    examples: images per epoch.
    total_steps: steps of the whole run.

  Returns:
    A function of the step. For a traced or device step it computes with JAX, in
    the widest float enabled; for an int or a NumPy array it computes on the host
    and uses no device.

  Raises:
    ConfigError: if the name is unknown or the warm-up outlasts the run.
  """
  s = config.schedule
  peak = config.optimizer.learning_rate
  warmup = config_lib.steps(s.warmup, batch_size, examples)
  share_of = trust.imported('schedule.name', s.name) if ':' in s.name else None
  if not share_of:
    errors.check_choice(f'config.schedule.name={s.name!r}', s.name, key_table.SCHEDULES)
  else:
    for shape in (), (2,):  # of a step; of the steps that a longer duration changes
      done = jax.ShapeDtypeStruct(shape, jnp.result_type(float))
      share = trust.called('schedule.name', s.name, jax.eval_shape, lambda x: share_of(x), done)
      words = 'a function that returns an array of the shape of its argument'
      errors.check(getattr(share, 'shape', None) == shape, 'schedule.name', s.name, words)
  if warmup > total_steps:
    raise config_lib.ConfigError(
      f'config.schedule.warmup={s.warmup!r} is {warmup} steps, but the whole '
      f'run is {total_steps}: shorten schedule.warmup or lengthen duration'
    )
  if 'every' in s:
    decays = config_lib.milestones(s.every, batch_size, examples)
  # A run that is all warm-up has nothing left to decay over.
  span = max(total_steps - warmup, 1)

  def rate(step):
    xp = jnp if isinstance(step, jax.Array) else np
    now = xp.asarray(step, xp.result_type(float))
    done = xp.clip((now - warmup) / span, 0.0, 1.0)
    if share_of:
      share = share_of(done)
    elif s.name == 'constant':
      share = xp.ones_like(now)
    elif s.name == 'cosine':
      share = s.end + (1 - s.end) * (1 + xp.cos(xp.pi * done)) / 2
    elif s.name == 'polynomial':
      share = s.end + (1 - s.end) * (1 - done) ** s.power
    elif s.name == 'range':
      share = xp.power(float(s.start), 1 - done)
    else:
      # Of integers: a float could miss a boundary by a step.
      first, *later = decays
      count = sum(step >= m for m in decays) if later else step // first
      share = xp.power(float(s.factor), count)
    if warmup:
      share = share * xp.minimum(now / warmup, 1.0)
    return peak * share

  return rate


def create(
  config: ConfigDict, batch_size: int, examples: int, total_steps: int, whole_leaves: bool = True
) -> optax.GradientTransformation:
  """The update of the weights from the reduced gradient.

  Its state is a pytree of arrays that are scalars or shaped like parameters,
  so it shards as they do. Call it on whole (or automatically partitioned)
  arrays: norms over one shard's slices are wrong.

  Args:
    config: resolved config; `optimizer.*` and `schedule.*` are read.
    batch_size: images per step over all devices.
    examples: images per epoch.
    total_steps: steps of the whole run.
    whole_leaves: whether `update` receives whole parameters, by their names. For
      slices, the caller applies effects 2 and 6 and passes `decays=`, its part of
      `slice_decays`, to `update`; the state's structure is the same.

  Returns:
    The optax transformation; `update` needs the parameters as well.

  Raises:
    ConfigError: if a name is unknown or the warm-up outlasts the run.
  """
  o = config.optimizer
  rate = schedule(config, batch_size, examples, total_steps)
  effects = []
  if o.clip_value:
    effects.append(optax.clip(o.clip_value))
  if o.clip_norm:
    clip = optax.clip_by_global_norm(o.clip_norm)
    effects.append(clip if whole_leaves else optax.identity())
  # A number that a program receives is not 0.
  has_decay = isinstance(o.weight_decay, jax.Array) or o.weight_decay != 0
  if has_decay and not _is_decoupled(o):
    effects.append(_decay(o, whole_leaves))
  effects.append(_optimizer(o, rate))
  if o.multipliers or multipliers.layer_decay(config) != 1:
    scaled = multipliers.scaled(config)
    effects.append(scaled if whole_leaves else optax.identity())
  return optax.chain(*effects)


def slice_decays(config: ConfigDict, params: Any) -> dict[str, float] | None:
  """Each parameter's weight decay, by path; None if decays have no multipliers.

  Args:
    config: config of the run.
    params: pytree of all parameters, arrays or shapes.
  """
  o = config.optimizer
  rules = o.get('decay_multipliers', ())
  if not o.weight_decay or not rules:
    return None
  return multipliers.decays(o.weight_decay, rules, decay_mask(params))


def decay_mask(params: Any) -> Any:
  """A pytree like `params`, True for leaves with weight decay and trust ratios."""
  return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def _decay(o, whole_leaves):
  """The third effect."""
  if not o.get('decay_multipliers', ()):  # a user's function lacks the key
    return optax.add_decayed_weights(o.weight_decay, decay_mask)
  if not whole_leaves:
    return multipliers.decayed_slice()
  return multipliers.decayed(o.weight_decay, o.decay_multipliers, decay_mask)


def _optimizer(o, rate) -> optax.GradientTransformation:
  """The optimizer of the registry, or of package.module:function.

  The function is called with the learning rate by step, hyper-parameters by name and,
  where it has arguments of these names, `weight_decay` and the `mask`s of kernels.
  """
  function = _function(o)
  masks = dict.fromkeys(('mask', 'weight_decay_mask', 'trust_ratio_mask'), decay_mask)
  settings = trust.accepted(function, {'weight_decay': o.weight_decay, **masks})
  if o.name in optimizers.OPTIMIZERS:
    entry = optimizers.OPTIMIZERS[o.name]
    arguments = {name: o[name] for name in entry.defaults} | dict(entry.constants)
  else:
    arguments = dict(o.arguments)
    trust.check_own('optimizer.arguments', o.arguments, settings)
  arguments |= settings
  result = trust.called('optimizer.name', o.name, function, rate, **arguments)
  good = isinstance(result, optax.GradientTransformation)
  words = 'a function that returns an optax.GradientTransformation'
  errors.check(good, 'optimizer.name', o.name, words)
  return result


def _is_decoupled(o):
  """Whether the optimizer's function applies weight decay itself."""
  return 'weight_decay' in inspect.signature(_function(o)).parameters


def _function(o) -> Callable:
  if ':' in o.name:
    return trust.imported('optimizer.name', o.name)
  errors.check_choice(f'config.optimizer.name={o.name!r}', o.name, optimizers.OPTIMIZERS)
  module, _, attribute = optimizers.OPTIMIZERS[o.name].address.partition(':')
  return getattr(importlib.import_module(module), attribute)


def lamb(
  learning_rate: optax.Schedule, b1: float, b2: float, eps: float, weight_decay: float, mask: Any
) -> optax.GradientTransformation:
  """LAMB; unlike optax.lamb, which scales biases by their trust ratio too."""
  return optax.chain(
    optax.scale_by_adam(b1=b1, b2=b2, eps=eps),
    optax.add_decayed_weights(weight_decay, mask),
    optax.masked(optax.scale_by_trust_ratio(), mask),
    optax.scale_by_learning_rate(learning_rate),
  )
