"""The one process that keeps a run, where the others only compute for it."""

from typing import Any

from anp_jax import cluster
from anp_jax.cluster import generation


class SingleProcess:
  """The process that evaluates and saves, in place of all processes of the run."""

  index, count, hosts = 0, 1, ('',)
  generation, is_elastic = generation.FIRST, False

  def __init__(self, processes: cluster.Processes):
    """Takes the place of all processes.

    Args:
      processes: processes of the run; this one is process 0.
    """
    self.env, self.vote = processes.env, processes.vote
    self.heartbeat, self.heartbeat_each = (processes.heartbeat, processes.heartbeat_each)
    self.handling_signals = processes.handling_signals

  def gather(self, value: Any) -> list:
    """Returns the value of this process alone."""
    return [value]

  def check_shared(self, workdir: str) -> None:
    """Accepts any workdir: the other processes never read it."""
