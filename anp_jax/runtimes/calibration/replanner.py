"""A measured split plan changes where offload devices are lost."""

import dataclasses

from anp_jax import config as config_lib
from anp_jax.config import strategy as strategy_lib
from anp_jax.parallel.channel_split import split as split_lib
from anp_jax.runtimes.calibration import calibrate, planner
from anp_jax.training import run_spec


class Replanner:
  """Watches the offload devices of a channel split, between the steps of its run."""

  def __init__(self, spec: run_spec.RunSpec, invocation: strategy_lib.Invocation):
    """Reads the measurements of the run.

    Args:
      spec: spec of the run; its config has the plan with which the run begins.
      invocation: invocation of the run, with its pool of offload devices.
    """
    self._spec, self._pool = spec, invocation.pool
    self._processes = invocation.processes
    strategy = invocation.config.strategy
    # They are not kept if a device was lost meanwhile: the plan then stays, as one by hand.
    self._measured = None
    if not (strategy.plan or strategy.shares):
      self._measured = calibrate.load(spec, invocation.workdir, self._processes)

  def revise(self, step: int) -> tuple[run_spec.RunSpec | None, list[str]]:
    """Plans again if devices were lost.

    Args:
      step: step that has been made.

    Returns:
      The run with another plan and without the lost devices, or None; and lines for
      people.
    """
    # A run that stops soon leaves them to the next one.
    news = [] if self._processes.vote() else self._pool.news()
    if not news or not self._measured:
      # Of a plan by hand, this process computes for devices that are lost.
      return None, [f'plan     {line}' for line in news]
    before = self._spec.offload_devices
    present = tuple(device for device in self._pool.devices if not device.is_lost)
    places = [0, *(1 + before.index(device) for device in present)]
    costs = self._measured[0].of_devices(places)
    plan = planner.best_plan(costs)
    self._measured = costs, plan
    changes = {'strategy.plan': str(split_lib.Split(plan)), 'strategy.shares': ()}
    config = config_lib.replaced(self._spec.config, changes)
    self._spec = dataclasses.replace(self._spec, config=config, offload_devices=present)
    news.append(f'config.strategy.plan={config.strategy.plan!r} after step {step}')
    return self._spec, [f'plan     {line}' for line in news]
