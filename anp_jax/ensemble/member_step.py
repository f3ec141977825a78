"""The training steps of several members of an ensemble, as one program.

Members differ in numbers alone, which the program receives as arrays. It makes many
steps of each: a small network's step takes an accelerator less time than starting it.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import members
from anp_jax.ensemble import device_examples
from anp_jax.training import build, train_step


@dataclasses.dataclass(frozen=True)
class MemberStep:
  """Steps of members that share a program.

  Attributes:
    program: model and steps of any of them.
    varied: keys of `members.NUMBERS` in which they differ.
  """

  program: build.ModelAndSteps
  varied: tuple[str, ...]

  @classmethod
  def create(cls, program: build.ModelAndSteps, configs: Sequence[ConfigDict]) -> 'MemberStep':
    """Finds out in which numbers the members' configs differ."""
    tables = [config_lib.flat(config) for config in configs]
    varied = tuple(key for key in members.NUMBERS if len({table.get(key) for table in tables}) > 1)
    return cls(program, varied)

  def numbers(self, configs: Sequence[ConfigDict]) -> dict[str, np.ndarray]:
    """The varied numbers (members,) by key.

    A number has the dtype in which a constant of the program would count.
    """
    dtypes = {'seed': np.int32, members.RATE: jnp.result_type(float)}
    dtype = self.program.spec.config.model.param_dtype
    return {
      key: np.array([config_lib.flat(c)[key] for c in configs], dtypes.get(key, dtype))
      for key in self.varied
    }

  def one(self, state: Any, numbers: Mapping[str, jax.Array], batch: dict) -> tuple[Any, jax.Array]:
    """Makes a step of one member; not jitted.

    Args:
      state: TrainState of the member.
      numbers: from `numbers`, of one member.
      batch: batch on the device.

    Returns:
      The state, and the values (1, 1, values) of `train_step.metric_names`.
    """
    training = self._training({key: x[0] for key, x in numbers.items()})
    state, values = training.step()(state, batch)
    return state, values[None, None]

  def many(
    self,
    state: Any,
    numbers: Mapping[str, jax.Array],
    examples: device_examples.Examples,
    draws: device_examples.Draws,
    count: jax.Array,
  ) -> tuple[Any, jax.Array]:
    """Makes some steps of each member; not jitted.

    Args:
      state: TrainState of all members, with a leading axis of them.
      numbers: from `numbers`.
      examples: training examples.
      draws: choices (members, most steps, batch, ...).
      count: () int32, steps to make, at most those of `draws`.

    Returns:
      The state, and the values (members, most steps, values) of `train_step.metric_names`.
    """
    objective, dtype = self.program.spec.objective, self.program.spec.config.model.param_dtype
    size = len(train_step.metric_names(objective))

    def steps(state, numbers, draws):
      training = self._training(numbers)
      step = training.step()

      def one_step(i, carry):
        state, table = carry
        chosen = jax.tree.map(lambda x: x[i], draws)
        state, values = step(state, device_examples.batch(training.config, examples, chosen))
        return state, table.at[i].set(values)

      table = jnp.zeros((len(draws.example), size), dtype)
      return lax.fori_loop(0, count, one_step, (state, table))

    return jax.vmap(steps)(state, dict(numbers), draws)

  def _training(self, numbers):
    """The training step with other numbers than those of the program's config."""
    spec = self.program.spec
    config = config_lib.replaced(spec.config, dict(numbers))
    training = self.program.training
    return dataclasses.replace(
      training,
      config=config,
      objective=dataclasses.replace(training.objective, smoothing=config.label_smoothing),
      **build.updates(spec, config, training.strategy_step),
    )
