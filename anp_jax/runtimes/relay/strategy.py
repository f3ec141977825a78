"""The strategy `relay`: many models in a ring; see `run`."""

from anp_jax.config import rules
from anp_jax.parallel.sync import strategy as sync


class Relay(sync.Sync):
  """Many models that travel around a ring of devices."""

  name = 'relay'
  state = 'relay'
  resumable = ('models', 'at_once')  # models: a list that grows
  keeps_models_apart = True

  def check(self, config):
    """Refuses models, shares and balances that a ring cannot have."""
    rules.check_shares(config)
    models = config['strategy.models']
    rules.check(
      models and all(isinstance(m, str) for m in models), 'strategy.models',
      models, "texts such as ('seed=1', 'seed=2; model.width=32')",
    )  # fmt: skip
    rules.check(
      not config['log.wandb'], 'log.wandb', config['log.wandb'],
      "'' where strategy.name is relay: its models have records of their own",
    )  # fmt: skip
    halving = config['strategy.halving']
    rules.check(halving != 1, 'strategy.halving', halving, '0, or 2 or more')
    balance = config['data.balance']
    rules.check(
      balance == 'none', 'data.balance', balance,
      "'none' where strategy.name is relay: a station knows its own part of "
      'the data only',
    )  # fmt: skip

  def joins_jax(self, config, mode):
    """No program spans the processes of a ring."""
    return False

  def run(self, job, loop):
    """Trains the models of the ring, or scores them again."""
    from anp_jax.runtimes.relay import run

    return run.run(
      job.config, job.workdir, job.processes, job.mode, job.checkpoint
    )
