"""The strategy `model_ring`: many models in a ring; see `run`."""

from collections.abc import Callable
from typing import Any

import ml_collections

from anp_jax.config import keys, rules, strategy as strategy_lib
from anp_jax.costs import collectives, steps
from anp_jax.parallel.sync import sync_strategy as sync
from anp_jax.runtimes import transport_keys


class ModelRing(sync.Sync):
  """Many models that travel around a ring of devices."""

  is_elastic = False
  state = 'model_ring'
  steps_together = False
  planned_mesh = {}
  keeps_models_apart = True

  def default_config(self) -> dict[str, keys.Key]:
    """Returns the models, and the stations that they visit."""
    return {
      # A list that may grow at its end; candidates without one have none.
      'models': keys.value(
        (),
        "overrides of each model, as in ('seed=1', 'seed=2; model.width=32')",
        lambda models: models and all(isinstance(m, str) for m in models),
        "texts such as ('seed=1', 'seed=2; model.width=32')",
        resumable=True,
      ),
      'station': keys.text(
        'device',
        'holder of a data part: a device, or a host with all its devices',
        ('device', 'host'),
      ),
      'shares': keys.Key(
        (),
        'proportional share of the training set of each station; (): equal',
        check=rules.check_shares,
        resumable=True,
      ),
      **transport_keys.KEYS,
    }

  def alternatives(self, config: dict[str, Any]) -> list[dict[str, str]]:
    """Returns what differs in each model of the ring."""
    models = config['strategy.models']
    if not isinstance(models, tuple | list):
      return []  # it is refused by its type
    parts = [[p.partition('=') for p in m.split(';')] for m in models if isinstance(m, str)]
    return [{key.strip(): value.strip() for key, _, value in model} for model in parts]

  def check(self, config: dict[str, Any]) -> None:
    """Refuses records and balances that a ring cannot have."""
    rules.check_tls(config)
    rules.check(
      not config['log.wandb'],
      'log.wandb',
      config['log.wandb'],
      "'' where strategy.name is model_ring: its models have records of their own",
    )
    rules.check(
      config['data.balance'] == 'none',
      'data.balance',
      config['data.balance'],
      "'none' where strategy.name is model_ring: a station knows its own part of the data only",
    )

  def joins_jax(self, config: ml_collections.ConfigDict, mode: str) -> bool:
    """Returns False: no program spans the processes of a ring."""
    return False

  def planned_parts(
    self, config: ml_collections.ConfigDict, cluster: collectives.Cluster
  ) -> tuple[int, int]:
    """Divides a model's batch over the devices of its station."""
    return (1 if config.strategy.station == 'device' else cluster.devices), config.accumulate

  def predicted_step(self, setting: steps.Setting, images: int) -> steps.Step:
    """Predicts a step of all stations."""
    from anp_jax.runtimes.model_ring import model_ring_cost

    return model_ring_cost.predicted_step(setting, images)

  def run(
    self, invocation: strategy_lib.Invocation, loop: Callable[[strategy_lib.Invocation], dict]
  ) -> dict:
    """Trains the models of the ring, or scores them again."""
    from anp_jax.runtimes.model_ring import model_ring_run as run

    how = invocation.mode, invocation.checkpoint
    return run.run(invocation.config, invocation.workdir, invocation.processes, *how)
