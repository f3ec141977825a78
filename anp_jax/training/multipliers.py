"""Multipliers of learning rates and weight decays; a rate of 0 freezes parameters.

Rules are those of sharding: an ordered list of (regex, value), the regex
searched for in the parameter's path; the first that matches wins. A frozen
parameter stays as it is to the bit, weight decay and averages included, and a
batch norm all of whose parameters are frozen normalises with its running
statistics and leaves these as they are.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib
import re
from typing import Any

from flax import linen as nn
from jax import lax
import jax.numpy as jnp
from ml_collections import ConfigDict
import optax

from anp_jax import config as config_lib
from anp_jax.config import errors
from anp_jax.models import layers
from anp_jax.parallel import mesh as mesh_lib

_STAGE = re.compile(r'stage(\d+)_(?:block(\d+))?')
Rules = Sequence[tuple[str, float]]


def factor(rules: Rules, name: str) -> float:
  """The multiplier of a parameter's learning rate.

  Args:
    rules: pairs of regex and value.
    name: path of the parameter, from `mesh.path_name`.
  """
  for pattern, value in rules:
    if re.search(pattern, name):
      return float(value)
  return 1.0


def rate_factors(config: ConfigDict, params: Any) -> dict[str, float]:
  """The multiplier of each parameter's learning rate, by path.

  It is the factor of config.optimizer.multipliers times layer_decay to the power
  of the number of layers above the parameter's layer.

  Args:
    config: config of the run.
    params: pytree of all parameters, arrays or shapes.
  """
  rules, decay = config.optimizer.multipliers, layer_decay(config)
  names = _paths(params)
  layers_of = layer_numbers(names)
  top = max(layers_of.values())
  return {name: factor(rules, name) * decay ** (top - layers_of[name]) for name in names}


def layer_decay(config: ConfigDict) -> float:
  """config.optimizer.layer_decay; 1 for a run with random initial weights."""
  return config.optimizer.get('layer_decay', 1.0)


def layer_numbers(names: Iterable[str]) -> dict[str, int]:
  """The layer that each parameter belongs to, by path.

  The stem is 0; blocks are 1, 2, ... from the first stage to the last, with
  ConvNeXt's downsampling in the first block of its stage; all else, the head with
  its norm, is one more than the last block.
  """
  places = {name: _place(name) for name in names}
  blocks = sorted({place for place in places.values() if place})
  numbers = {place: i for i, place in enumerate(blocks, 1)}
  return {
    name: 0 if name.startswith(('stem', 'whitened')) else numbers.get(place, len(blocks) + 1)
    for name, place in places.items()
  }


def scaled(config: ConfigDict) -> optax.GradientTransformation:
  """Multiplies the update of each parameter, as the last effect of a chain."""

  def scale(updates, _):
    factors = rate_factors(config, updates)
    return mesh_lib.map_by_name(lambda name, u: multiplied(u, factors[name]), updates)

  def multiplied(update, value):
    if not value:  # also of an update that is not finite
      return jnp.zeros_like(update)
    return update if value == 1 else update * jnp.asarray(value, update.dtype)

  return optax.stateless(scale)


def decays(weight_decay: float, rules: Rules, mask: Any) -> dict[str, float]:
  """Each parameter's weight decay, by path.

  Args:
    weight_decay: decay of a parameter that no rule matches.
    rules: pairs of regex and multiplier.
    mask: pytree like the parameters, True for those that decay.
  """
  return {
    name: is_decayed * weight_decay * factor(rules, name)
    for name, is_decayed in mesh_lib.leaves_by_name(mask).items()
  }


def decayed(weight_decay: float, rules: Rules, mask: Callable) -> optax.GradientTransformation:
  """Adds weight decay, multiplied by rules, to the gradient.

  Args:
    weight_decay: decay of a parameter that no rule matches.
    rules: pairs of regex and multiplier.
    mask: params -> pytree like them, True for those that decay.
  """

  def add(updates, params):
    amounts = decays(weight_decay, rules, mask(params))
    return mesh_lib.map_by_name(
      lambda name, update, parameter: update + jnp.asarray(amounts[name], update.dtype) * parameter,
      updates,
      params,
    )

  return optax.stateless(add)


def decayed_slice() -> optax.GradientTransformationExtraArgs:
  """Adds `decays`, an array, times the weights to the gradient of a slice."""

  def update(gradient, state, weights, *, decays, **_):
    return gradient + decays * weights, state

  return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def check(key: str, rules: Rules, params: Any) -> None:
  """Refuses a rule that no parameter matches.

  Args:
    key: config key of the rules.
    rules: pairs of regex and value.
    params: pytree of all parameters, arrays or shapes.

  Raises:
    ConfigError: naming the rule, with the nearest path or the modules.
  """
  names = list(_paths(params))
  for pattern, _ in rules:
    if not any(re.search(pattern, name) for name in names):
      near = config_lib.nearest(pattern, [*_modules(names), *names])
      raise config_lib.ConfigError(
        f'config.{key}: {pattern!r} matches no parameter'
        + (near or f'; the modules are {", ".join(_modules(names))}')
      )


def check_layers(config: ConfigDict, params: Any) -> None:
  """Refuses layer-wise decay for a network without stages of blocks.

  Args:
    config: config of the run.
    params: pytree of all parameters, arrays or shapes.

  Raises:
    ConfigError: naming the network's modules.
  """
  names = _paths(params)
  good = layer_decay(config) == 1 or any(map(_place, names))
  words = (
    '1, or a network whose modules are stage1_block1 and so on; those of '
    f'{config.model.name} are {", ".join(_modules(names))}'
  )
  errors.check(good, 'optimizer.layer_decay', layer_decay(config), words)


def check_that_some_train(rules: Rules, params: Any) -> None:
  """Refuses rules that freeze all parameters.

  Args:
    rules: pairs of regex and value of config.optimizer.multipliers.
    params: pytree of all parameters, arrays or shapes.

  Raises:
    ConfigError: naming the rules.
  """
  good = not rules or any(factor(rules, name) for name in _paths(params))
  words = 'a value above 0 for some parameter, or nothing trains'
  errors.check(good, 'optimizer.multipliers', rules, words)


class Frozen:
  """The parameters and norms that a step does not change.

  Attributes:
    norms: paths of the modules whose parameters are all frozen.
  """

  def __init__(self, rules: Rules, params: Any):
    """Finds the frozen parameters and norms.

    Args:
      rules: pairs of regex and value.
      params: pytree of all parameters, arrays or shapes.
    """
    free = {name: bool(factor(rules, name)) for name in _paths(params)}
    self._names = {name for name, trains in free.items() if not trains}
    modules = {name.rpartition('/')[0] for name in self._names}
    self.norms = modules - {name.rpartition('/')[0] for name, trains in free.items() if trains}

  def stop_gradients(self, params: Any) -> Any:
    """The same parameters; no gradient of the frozen ones is computed."""
    return self._params(lax.stop_gradient, params)

  def zero_gradients(self, gradients: Any) -> Any:
    """The same gradients, zero for frozen parameters."""
    return self._params(jnp.zeros_like, gradients)

  def is_frozen_stat(self, statistic: str) -> bool:
    """Whether a running statistic, such as 'batch_stats/stem_norm/mean', is kept."""
    return statistic.partition('/')[2].rpartition('/')[0] in self.norms

  def wrap_update(self, update: Callable) -> Callable:
    """An update that keeps frozen parameters and statistics.

    Sums over devices, and means over groups, may round numbers that do not change.

    Args:
      update: (state, reduced) -> (state, values).
    """
    if not self._names:
      return update

    def update_rest(state, reduced):
      new, values = update(state, reduced)
      trees = {'params': new.params, 'stats': new.stats}
      trees = self._restored(trees, {'params': state.params, 'stats': state.stats})
      average = new.average and self._restored(new.average, state.average)
      return new.replace(**trees, average=average), values

    return update_rest

  @contextlib.contextmanager
  def applied(self) -> Iterator[None]:
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
      x, *rest = arguments
      keywords = {name: value for name, value in keywords.items() if name != 'train'}
      return following(x, False, *rest[1:], **keywords)
    # Flax refuses a value both here and in the field.
    field = module.use_running_average
    object.__setattr__(module, 'use_running_average', None)
    try:
      keywords = {**keywords, 'use_running_average': True}
      return following(arguments[0], **keywords)
    finally:  # the layer may be called again
      object.__setattr__(module, 'use_running_average', field)

  def _restored(self, new, old):
    """New parameters and statistics, with the old values of frozen ones."""
    stats = mesh_lib.map_by_name(
      lambda name, now, before: before if self.is_frozen_stat(name) else now,
      new['stats'],
      old['stats'],
    )
    params = self._params(lambda _, o: o, new['params'], old['params'])
    return {'params': params, 'stats': stats}

  def _params(self, function, *trees):
    """The first tree, with `function` of the trees' leaves for frozen parameters."""
    return mesh_lib.map_by_name(
      lambda name, *leaves: function(*leaves) if name in self._names else leaves[0], *trees
    )


def _modules(names):
  """The network's modules, from the paths of its parameters."""
  return sorted({name.partition('/')[0] for name in names})


def _place(name):
  """(stage, block) of a parameter; None: outside of all stages."""
  match = _STAGE.match(name)
  return match and (int(match[1]), int(match[2] or 1))


def _paths(params):
  return list(mesh_lib.leaves_by_name(params))
