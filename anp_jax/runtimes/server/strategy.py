"""The strategy `server`: which processes do what; see `run`."""

from anp_jax.config import rules
from anp_jax.parallel.sync import strategy as sync


class Server(sync.Sync):
  """Asynchronous training with parameter servers."""

  name = 'server'
  resumable = (
    'servers', 'dedicated', 'mode', 'max_staleness', 'backup_workers',
    'compensation', 'weight_prediction', 'wire_dtype', 'lanes',
    'ticket_timeout', 'bind', 'tls_certificate', 'tls_key',
  )  # fmt: skip

  def check(self, config):
    """Refuses optimizers and modes that slices of weights cannot have."""
    rules.check_tls(config)
    optimizer = config['optimizer.name']
    rules.check(
      optimizer not in ('lars', 'lamb'), 'optimizer.name', optimizer,
      'another one where strategy.name is server: its trust ratios are norms '
      'of whole layers, and a server has a slice',
    )  # fmt: skip
    mode = config['strategy.mode']
    backups = config['strategy.backup_workers']
    rules.check(
      not backups or mode == 'synchronous', 'strategy.backup_workers', backups,
      f"0 where strategy.mode is '{mode}': nobody is waited for there",
    )  # fmt: skip
    rules.check_replicated(
      config, 'strategy.name is server: the servers divide the state'
    )

  def spans_processes(self, config, mode):
    """Asynchronous processes meet at their servers, and outlive each other."""
    return mode != 'train'

  def needs_platform(self, config, index):
    """A process that only serves may do so on the CPU."""
    s = config.strategy
    return not s.dedicated or index >= s.servers

  def run(self, job, loop):
    """Serves, trains, or both."""
    if job.mode != 'train':
      return loop(job)
    from anp_jax.runtimes.server import run  # Flight is imported

    return run.run(job.config, job.workdir, job.processes)
