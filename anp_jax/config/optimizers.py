"""The optimizers that a config can name: their functions and hyper-parameters.

Nothing heavy is imported here: an optimizer is looked up when a run is built.
"""

from collections.abc import Mapping
import dataclasses


@dataclasses.dataclass(frozen=True)
class Optimizer:
  """An entry of the registry.

  Attributes:
    address: module:function, called as `training.optimizer` describes.
    defaults: hyper-parameters, by the names of the keys and of the function's arguments.
    constants: further arguments of the function.
    is_elementwise: whether the update of an element depends on no other element, so
      that a part of a leaf may be updated alone.
    is_decoupled: whether the function applies weight decay itself; else the decay is
      added to the gradient, and has multipliers.
  """

  address: str
  defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)
  constants: Mapping[str, object] = dataclasses.field(default_factory=dict)
  is_elementwise: bool = False
  is_decoupled: bool = False

  @property
  def keys(self) -> tuple[str, ...]:
    """The keys of config.optimizer that apply with this optimizer."""
    return (*self.defaults, *(() if self.is_decoupled else ('decay_multipliers',)))


_ADAM = {'b1': 0.9, 'b2': 0.999, 'eps': 1e-8}
# The LARS paper's coefficient, and optax's default; stated so that it cannot drift.
_LARS = {'trust_coefficient': 0.001}
# As tf.train.RMSPropOptimizer: epsilon under the root and a mean square that starts
# at 1. The paper's epsilon of 1.0 means nothing elsewhere.
_RMSPROP = {'initial_scale': 1.0, 'eps_in_sqrt': True}
OPTIMIZERS = {
  'sgd': Optimizer('optax:sgd', is_elementwise=True),
  'momentum': Optimizer('optax:sgd', {'momentum': 0.9}, is_elementwise=True),
  'nesterov': Optimizer('optax:sgd', {'momentum': 0.9}, {'nesterov': True}, is_elementwise=True),
  'rmsprop': Optimizer(
    'optax:rmsprop', {'decay': 0.9, 'momentum': 0.9, 'eps': 1e-8}, _RMSPROP, is_elementwise=True
  ),
  'adam': Optimizer('optax:adam', _ADAM, is_elementwise=True),
  'adamw': Optimizer('optax:adamw', _ADAM, is_elementwise=True, is_decoupled=True),
  'lars': Optimizer('optax:lars', {'momentum': 0.9}, _LARS, is_decoupled=True),
  'lamb': Optimizer('anp_jax.training.optimizer:lamb', _ADAM, is_decoupled=True),
  'lion': Optimizer('optax:lion', {'b1': 0.9, 'b2': 0.99}, is_elementwise=True, is_decoupled=True),
}


def defaults(name: str) -> dict[str, float]:
  """Returns the defaults of an optimizer's hyper-parameters, by dotted key."""
  entry = OPTIMIZERS.get(str(name))
  return {f'optimizer.{leaf}': value for leaf, value in entry.defaults.items()} if entry else {}
