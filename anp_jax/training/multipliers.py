"""Multipliers of rates and decays, and what a rate of 0 freezes.

Rules are those of sharding: an ordered list of (regex, value), the regex
searched for in the parameter's path; the first that matches wins. A frozen
parameter stays as it is to the bit, weight decay and averages included, and a
batch norm all of whose parameters are frozen normalises with its running
statistics and leaves these as they are.
"""

from collections.abc import Iterable
import contextlib
import re

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import optax

from anp_jax import config as config_lib
from anp_jax.models import layers
from anp_jax.parallel import mesh as mesh_lib

_STAGE = re.compile(r'stage(\d+)_(?:block(\d+))?')


def factor(rules, name: str) -> float:
  """What the learning rate of a parameter is multiplied by.

  Args:
    rules: pairs of regex and value.
    name: the parameter's path, as `mesh.path_name` gives it.
  """
  for pattern, value in rules:
    if re.search(pattern, name):
      return float(value)
  return 1.0


def rate_factors(config, params) -> dict[str, float]:
  """What each parameter's learning rate is multiplied by, by its path.

  The factor of config.optimizer.multipliers times layer_decay to the power of
  the layers above the parameter's own.

  Args:
    config: the run's config.
    params: pytree of all parameters, arrays or shapes.
  """
  rules, decay = config.optimizer.multipliers, layer_decay(config)
  names = _paths(params)
  layers_of = layer_numbers(names)
  top = max(layers_of.values())
  return {name: factor(rules, name) * decay ** (top - layers_of[name]) for name in names}


def layer_decay(config) -> float:
  """config.optimizer.layer_decay; 1 where a run begins at random."""
  return config.optimizer.get('layer_decay', 1.0)


def layer_numbers(names: Iterable[str]) -> dict[str, int]:
  """The layer that each parameter belongs to, by its path.

  The stem is 0; blocks are 1, 2, ... from the first stage to the last, a
  stage's own modules (ConvNeXt's downsampling) belonging to its first block;
  all else, the head with its norm, is one more than the last block.
  """
  places = {name: _place(name) for name in names}
  blocks = sorted({place for place in places.values() if place})
  numbers = {place: i for i, place in enumerate(blocks, 1)}
  return {
    name: 0 if name.startswith('stem') else numbers.get(place, len(blocks) + 1)
    for name, place in places.items()
  }


def scaled(config) -> optax.GradientTransformation:
  """Multiplies the update of each parameter, as the last effect of a chain."""

  def scale(updates, _):
    factors = rate_factors(config, updates)
    return jax.tree_util.tree_map_with_path(
      lambda path, update: multiplied(update, factors[mesh_lib.path_name(path)]), updates
    )

  def multiplied(update, value):
    if not value:  # also of an update that is not finite
      return jnp.zeros_like(update)
    return update if value == 1 else update * jnp.asarray(value, update.dtype)

  return optax.stateless(scale)


def decays(weight_decay: float, rules, mask) -> dict[str, float]:
  """What each parameter is multiplied by and added to its gradient, by path.

  Args:
    weight_decay: of a parameter that no rule matches.
    rules: pairs of regex and value.
    mask: pytree of all parameters, True for those that decay at all.
  """
  leaves = jax.tree_util.tree_leaves_with_path(mask)
  names = {mesh_lib.path_name(path): is_decayed for path, is_decayed in leaves}
  return {
    name: is_decayed * weight_decay * factor(rules, name) for name, is_decayed in names.items()
  }


def decayed(weight_decay: float, rules, mask) -> optax.GradientTransformation:
  """Adds weight decay to the gradient, a multiple of it by rules.

  Args:
    weight_decay: of a parameter that no rule matches.
    rules: pairs of regex and value.
    mask: params -> a pytree of them, True for those that decay at all.
  """

  def add(updates, params):
    amounts = decays(weight_decay, rules, mask(params))
    return jax.tree_util.tree_map_with_path(
      lambda path, update, parameter: (
        update + jnp.asarray(amounts[mesh_lib.path_name(path)], update.dtype) * parameter
      ),
      updates,
      params,
    )

  return optax.stateless(add)


def decayed_slice() -> optax.GradientTransformationExtraArgs:
  """Adds to the gradient of a slice `decays`, an array, times its weights."""

  def update(gradient, state, weights, *, decays, **_):
    return gradient + decays * weights, state

  return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def check(key: str, rules, params) -> None:
  """Refuses a rule that no parameter matches.

  Args:
    key: of the rules.
    rules: pairs of regex and value.
    params: pytree of arrays or shapes.

  Raises:
    ConfigError: naming the rule, with the nearest path or the modules.
  """
  names = list(_paths(params))
  modules = sorted({name.partition('/')[0] for name in names})
  for pattern, _ in rules:
    if not any(re.search(pattern, name) for name in names):
      near = config_lib.nearest(pattern, [*modules, *names])
      raise config_lib.ConfigError(
        f'config.{key}: {pattern!r} matches no parameter'
        + (near or f'; the modules are {", ".join(modules)}')
      )


def check_layers(config, params) -> None:
  """Refuses layer-wise decay of a network without stages of blocks.

  Args:
    config: the run's config.
    params: pytree of arrays or shapes.

  Raises:
    ConfigError: naming the network's modules.
  """
  names = _paths(params)
  if layer_decay(config) != 1 and not any(map(_place, names)):
    modules = sorted({name.partition('/')[0] for name in names})
    raise config_lib.ConfigError(
      f'config.optimizer.layer_decay={layer_decay(config):g}: expected 1, or a '
      'network whose modules are stage1_block1 and so on; those of '
      f'{config.model.name} are {", ".join(modules)}'
    )


def check_that_some_train(rules, params) -> None:
  """Refuses rules that freeze all parameters.

  Args:
    rules: pairs of regex and value of config.optimizer.multipliers.
    params: pytree of arrays or shapes.

  Raises:
    ConfigError: naming the rules.
  """
  if rules and not any(factor(rules, name) for name in _paths(params)):
    raise config_lib.ConfigError(
      f'config.optimizer.multipliers={rules!r}: expected a value above 0 for '
      'some parameter, or nothing trains'
    )


class Frozen:
  """What a step leaves as it is; a step without any is not changed.

  Attributes:
    norms: paths of the modules all of whose parameters are frozen.
  """

  def __init__(self, rules, params):
    """Finds the frozen parameters and norms.

    Args:
      rules: pairs of regex and value.
      params: pytree of arrays or shapes.
    """
    free = {name: bool(factor(rules, name)) for name in _paths(params)}
    self._names = {name for name, trains in free.items() if not trains}
    modules = {name.rpartition('/')[0] for name in self._names}
    self.norms = modules - {name.rpartition('/')[0] for name, trains in free.items() if trains}

  def stop_gradients(self, params):
    """The same parameters; no gradient is computed of the frozen ones."""
    return self._params(lax.stop_gradient, params)

  def zero_gradients(self, gradients):
    """The same gradients, zero for frozen parameters."""
    return self._params(jnp.zeros_like, gradients)

  def is_frozen_stat(self, statistic: str) -> bool:
    """Whether a norm's running statistic stays as it is.

    Args:
      statistic: its path, such as 'batch_stats/stem_norm/mean'.
    """
    return statistic.partition('/')[2].rpartition('/')[0] in self.norms

  def wrap_update(self, update):
    """An update that leaves what is frozen as it was.

    Sums over devices, and means over groups, may round what does not change.

    Args:
      update: (state, reduced) -> (state, values).
    """
    if not self._names:
      return update

    def update_rest(state, reduced):
      new, values = update(state, reduced)
      average = {}
      if new.average:
        average = self._restored(new.average, state.average)
      trees = self._restored(
        {'params': new.params, 'stats': new.stats}, {'params': state.params, 'stats': state.stats}
      )
      return new.replace(**trees, average=average), values

    return update_rest

  @contextlib.contextmanager
  def applied(self):
    """In this context, frozen norms of a model use their running statistics."""
    if not self.norms:
      yield
      return
    with nn.intercept_methods(self._intercept):
      yield

  def _intercept(self, following, arguments, keywords, context):
    module = context.module
    is_norm = isinstance(module, layers.BatchNorm | nn.BatchNorm)
    frozen = is_norm and '/'.join(module.path) in self.norms
    if not frozen or context.method_name != '__call__':
      return following(*arguments, **keywords)
    if isinstance(module, layers.BatchNorm):
      x, _, *added = arguments
      return following(x, False, *added, **keywords)
    # Flax refuses a value both here and in the field.
    field = module.use_running_average
    object.__setattr__(module, 'use_running_average', None)
    try:
      keywords = {**keywords, 'use_running_average': True}
      return following(arguments[0], **keywords)
    finally:  # the layer may be called again
      object.__setattr__(module, 'use_running_average', field)

  def _restored(self, new, old):
    """New parameters and statistics, with the old ones where frozen."""
    stats = jax.tree_util.tree_map_with_path(
      lambda path, now, before: before if self.is_frozen_stat(mesh_lib.path_name(path)) else now,
      new['stats'],
      old['stats'],
    )
    params = self._params(lambda _, o: o, new['params'], old['params'])
    return {'params': params, 'stats': stats}

  def _params(self, function, tree, *more_trees):
    """A tree like the parameters, with a function of what is frozen there."""

    def apply(path, leaf, *more):
      if mesh_lib.path_name(path) in self._names:
        return function(leaf, *more)
      return leaf

    return jax.tree_util.tree_map_with_path(apply, tree, *more_trees)


def _place(name):
  """(stage, block) of a parameter; None: of no stage."""
  match = _STAGE.match(name)
  return match and (int(match[1]), int(match[2] or 1))


def _paths(params):
  return [mesh_lib.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
