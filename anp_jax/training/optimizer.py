"""Optimizers and learning-rate schedules from the config, through optax.

A gradient goes through these effects, in this order:

1. `optimizer.clip_value`: each element to at most this magnitude.
2. `optimizer.clip_norm`: the whole gradient to at most this global norm.
3. `optimizer.weight_decay` times the weights, times a factor of
   `optimizer.decay_multipliers` by rules, is added to the gradient (L2, so the
   decay is not clipped but does pass through momentum and scaling). adamw,
   lars and lamb do not take it here but in their own place: adamw next
   to the scaled gradient, lars before and lamb within the trust ratio.
4. The optimizer's direction.
5. The learning rate. rmsprop and lars apply momentum after it, as their
   authors did, so that a decay of the rate takes time to be felt.
6. `optimizer.multipliers` and `layer_decay`: a factor of the whole update of a
   parameter, hence of its learning rate; 0 freezes it, see `multipliers`.

Weight decay and trust ratios act on leaves of two or more dimensions only:
biases and the scales of norm layers are vectors. The rank alone decides, not
the name, so a matrix that a model calls something else than `kernel` decays
too, and whole parameters must be given: raveled or stacked ones change rank.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from anp_jax import config as config_lib
from anp_jax.config import key_table
from anp_jax.training import multipliers

# These take weight decay in their own place, not added to the gradient.
_OWN_DECAY = ('adamw', 'lars', 'lamb')
# The LARS paper's, and optax's default; stated so that it cannot drift.
_LARS_TRUST = 0.001


def schedule(config, batch_size: int, examples: int, total_steps: int) -> optax.Schedule:
  """The learning rate as a closed form of the step, so any step can be asked.

  With peak p, warm-up w and total t steps, and d = clip((s - w) / (t - w)):
    constant:    p
    cosine:      p (end + (1 - end) (1 + cos(pi d)) / 2)
    polynomial:  p (end + (1 - end) (1 - d)^power)
    range:       p start^(1 - d), the range test of Smith (2015), arXiv
      1506.01186, with equal ratios
    step, exponential: p factor^floor(s / every), one staircase under the two
      names it is known by; decays are counted from step 0, not from w. Where
      schedule.every has several durations, p factor^n from the n-th on.
  Each is multiplied by a + (1 - a) min(1, s / w), where a is
    schedule.warmup_start of the strategy `parameter_server`, else 0.

  Args:
    config: the resolved config; `optimizer.learning_rate` and `schedule.*`.
    batch_size: images a step, over all devices.
    examples: images an epoch.
    total_steps: steps of the whole run.

  Returns:
    A function of the step. Given a traced or device step it computes with JAX,
    in the widest float enabled; given an int or a NumPy array it computes on
    the host and touches no device, so that it is free to log and to plot.

  Raises:
    ConfigError: if the name is unknown or the warm-up outlasts the run.
  """
  s = config.schedule
  peak = config.optimizer.learning_rate
  warmup = config_lib.steps(s.warmup, batch_size, examples)
  if s.name not in key_table.SCHEDULES:
    raise _unknown('schedule.name', s.name, key_table.SCHEDULES)
  if warmup > total_steps:
    raise config_lib.ConfigError(
      f'config.schedule.warmup={s.warmup!r} is {warmup} steps, but the whole '
      f'run is {total_steps}: shorten schedule.warmup or lengthen duration'
    )
  start = s.get('warmup_start', 0.0)  # a key of `parameter_server`
  if 'every' in s:
    decays = config_lib.milestones(s.every, batch_size, examples)
  # A run that is all warm-up has nothing left to decay over.
  span = max(total_steps - warmup, 1)

  def rate(step):
    xp = jnp if isinstance(step, jax.Array) else np
    now = xp.asarray(step, xp.result_type(float))
    done = xp.clip((now - warmup) / span, 0.0, 1.0)
    if s.name == 'constant':
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
      rise = xp.minimum(now / warmup, 1.0)
      share = share * (start + (1 - start) * rise)
    return peak * share

  return rate


def create(
  config, batch_size: int, examples: int, total_steps: int, whole_leaves: bool = True
) -> optax.GradientTransformation:
  """The whole update, from the reduced gradient to what is added to weights.

  Its state is a pytree of arrays that are scalars or shaped like parameters,
  so it shards as they do. Call it on whole (or automatically partitioned)
  arrays: norms over one shard's slices are wrong.

  Args:
    config: the resolved config; `optimizer.*` and `schedule.*`.
    batch_size: images a step, over all devices.
    examples: images an epoch.
    total_steps: steps of the whole run.
    whole_leaves: whether it is given whole parameters, by their names. With
      slices, effects 2 and 6 are the caller's, and `update` is given
      `decays=`, the part of `slice_decays`; the state's structure is the same.

  Returns:
    The optax transformation; `update` needs the parameters as well.

  Raises:
    ConfigError: for an unknown name or a warm-up that outlasts the run.
  """
  o = config.optimizer
  rate = schedule(config, batch_size, examples, total_steps)
  effects = []
  if o.clip_value:
    effects.append(optax.clip(o.clip_value))
  if o.clip_norm:
    clip = optax.clip_by_global_norm(o.clip_norm)
    effects.append(clip if whole_leaves else optax.identity())
  if o.weight_decay and o.name not in _OWN_DECAY:
    effects.append(_decay(o, whole_leaves))
  effects.append(_optimizer(o, rate))
  if o.multipliers or multipliers.layer_decay(config) != 1:
    scaled = multipliers.scaled(config)
    effects.append(scaled if whole_leaves else optax.identity())
  return optax.chain(*effects)


def slice_decays(config, params) -> dict[str, float] | None:
  """What `update` of a slice needs of each parameter, by its path.

  Args:
    config: the run's config.
    params: pytree of all parameters, arrays or shapes.

  Returns:
    What `multipliers.decays` does; None where decays are not multiplied.
  """
  o = config.optimizer
  rules = o.get('decay_multipliers', ())
  if not o.weight_decay or not rules:
    return None
  return multipliers.decays(o.weight_decay, rules, decay_mask(params))


def decay_mask(params):
  """True for each leaf of `params` that weight decay and trust ratios touch."""
  return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def _decay(o, whole_leaves):
  """The third effect."""
  if not o.decay_multipliers:
    return optax.add_decayed_weights(o.weight_decay, decay_mask)
  if not whole_leaves:
    return multipliers.decayed_slice()
  return multipliers.decayed(o.weight_decay, o.decay_multipliers, decay_mask)


def _optimizer(o, rate) -> optax.GradientTransformation:
  if o.name == 'sgd':
    return optax.sgd(rate)
  if o.name in ('momentum', 'nesterov'):
    return optax.sgd(rate, momentum=o.momentum, nesterov=o.name == 'nesterov')
  if o.name == 'rmsprop':
    # As tf.train.RMSPropOptimizer: epsilon under the root and a mean square
    # that starts at 1. The paper's epsilon of 1.0 means nothing elsewhere.
    return optax.rmsprop(
      rate,
      decay=o.decay,
      eps=o.eps,
      initial_scale=1.0,
      eps_in_sqrt=True,
      momentum=o.momentum or None,
    )
  if o.name == 'adam':
    return optax.adam(rate, b1=o.b1, b2=o.b2, eps=o.eps)
  if o.name == 'adamw':
    return optax.adamw(
      rate, b1=o.b1, b2=o.b2, eps=o.eps, weight_decay=o.weight_decay, mask=decay_mask
    )
  if o.name == 'lars':
    return optax.lars(
      rate,
      weight_decay=o.weight_decay,
      weight_decay_mask=decay_mask,
      trust_coefficient=_LARS_TRUST,
      trust_ratio_mask=decay_mask,
      momentum=o.momentum,
    )
  if o.name == 'lamb':
    # Not optax.lamb: that one scales biases by their trust ratio too.
    return optax.chain(
      optax.scale_by_adam(b1=o.b1, b2=o.b2, eps=o.eps),
      optax.add_decayed_weights(o.weight_decay, decay_mask),
      optax.masked(optax.scale_by_trust_ratio(), decay_mask),
      optax.scale_by_learning_rate(rate),
    )
  raise _unknown('optimizer.name', o.name, key_table.OPTIMIZERS)


def _unknown(key, name, valid) -> config_lib.ConfigError:
  return config_lib.ConfigError(
    f'config.{key}={name!r}: expected one of {", ".join(valid)}{config_lib.nearest(name, valid)}'
  )
