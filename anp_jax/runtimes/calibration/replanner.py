"""Changes of a channel split's plan during a run, as its devices change."""

import dataclasses
import math
import time

from anp_jax import config as config_lib
from anp_jax.config import strategy as strategy_lib
from anp_jax.parallel.channel_split import split as plan_lib
from anp_jax.runtimes.calibration import calibrate, costs as costs_lib, planner, probe as probe_lib
from anp_jax.training import run_spec

_FIRST_STEPS = 10  # until the time of a step is known
# The devices are measured again once their speeds, in proportion, were off by
# more than this in so many checks in a row.
_OFF, _IN_A_ROW = 1.1, 3


class Replanner:
  """Watches the devices of a channel split, between the steps of its run.

  Every config.strategy.check_plan seconds a part of one layer is timed on all
  of them, unless the plan was made by hand. Where offload devices are lost, a
  measured plan changes at the next step.
  """

  def __init__(
    self, spec: run_spec.RunSpec, invocation: strategy_lib.Invocation, is_measured: bool
  ):
    """Prepares the replanner; all processes call it.

    Args:
      spec: spec of the run; its config has the plan with which the run begins.
      invocation: invocation of the run.
      is_measured: whether that plan was made from measurements, not by hand.
    """
    self._spec, self._workdir = spec, invocation.workdir
    self._processes, self._pool = invocation.processes, invocation.pool
    # Measurements are not kept if a device was lost meanwhile: then the plan is
    # treated as one by hand.
    saved = calibrate.load(spec, invocation.workdir, invocation.processes) if is_measured else None
    self._costs: costs_lib.Costs | None = None
    self._plan: costs_lib.Plan = {}
    if saved:
      self._costs, self._plan = saved
    self._news: list[str] = []
    self._probe: probe_lib.Probe | None = None
    self._normal, self._in_a_row = 1.0, 0
    self._last_check, self._next_step = (0, time.monotonic()), 0

  def is_due(self, step: int) -> bool:
    """Returns whether `revise` has something to do after a step, on all processes."""
    if self._pool is not None:
      self._news += self._pool.news()
    if not self._next_step:
      self._last_check = step, time.monotonic()
      self._next_step = step + _FIRST_STEPS
    # One that trains alone may know that it stops soon.
    if self._processes.count == 1 and self._processes.vote():
      return False
    checks_speeds = bool(self._spec.config.strategy.check_plan and self._plan)
    return bool(self._news) or (checks_speeds and step >= self._next_step)

  def revise(self, step: int) -> tuple[run_spec.RunSpec | None, list[str]]:
    """Plans again where that is due; all processes call it after the same step.

    Args:
      step: step that all devices have completed.

    Returns:
      The run with another plan or other offload devices, or None; and lines for
      people.
    """
    news, self._news = self._news, []
    if news and self._costs is None:
      # By hand: the plan stays, and this process computes for devices that are lost.
      return None, [f'plan     {line}' for line in news]
    if news:
      spec = self._with_present_devices()
    else:
      news = ['the devices are not as fast as they were']
      spec = self._with_present_speeds(step)
    if spec is None:
      return None, []
    self._spec = spec
    self._probe, self._normal, self._in_a_row = None, 1.0, 0
    self._next_step = 0  # a step takes another time now
    s = spec.config.strategy
    text = f'plan={s.plan!r}' if s.plan else f'shares={tuple(s.shares)}'
    lines = [*news, f'config.strategy.{text} after step {step}']
    return spec, [f'plan     {line}' for line in lines]

  def _with_present_devices(self):
    present = tuple(d for d in self._pool.devices() if not d.is_lost)
    before = self._spec.offload_devices
    places = [0, *(1 + before.index(device) for device in present)]
    self._costs = self._costs.of_devices(places)
    self._plan = planner.best_plan(self._costs)
    return self._planned(dataclasses.replace(self._spec, offload_devices=present))

  def _with_present_speeds(self, step):
    if not self._is_time(step):
      return None
    if self._probe is None:
      self._probe = probe_lib.Probe(self._spec, self._processes, self._costs, self._plan)
    slowdown = self._probe.slowdown() / self._normal
    is_off = max(slowdown) / min(slowdown) > _OFF
    self._in_a_row = self._in_a_row + 1 if is_off else 0
    if self._in_a_row < _IN_A_ROW:
      return None
    self._in_a_row = 0
    costs, plan = calibrate.measure_and_plan(self._spec, self._workdir, self._processes)
    if str(plan_lib.Plan(plan)) == str(plan_lib.Plan(self._plan)):
      # These are the speeds to compare with.
      self._normal = self._normal * slowdown
      return None
    self._costs, self._plan = costs, plan
    return self._planned(self._spec)

  def _is_time(self, step):
    """Returns whether the seconds between two checks have passed; counts in steps.

    All processes must check after the same step, by the clock of the first.
    """
    last_step, last_time = self._last_check
    seconds = self._processes.gather(time.monotonic() - last_time)[0]
    interval = self._spec.config.strategy.check_plan
    is_time = seconds >= interval
    left = interval - (0 if is_time else seconds)
    if is_time:
      self._last_check = step, time.monotonic()
    self._next_step = step + max(1, math.ceil(left / max(seconds, 1e-9) * (step - last_step)))
    return is_time

  def _planned(self, spec):
    changes = {'strategy.plan': calibrate.plan_text(self._costs, self._plan), 'strategy.shares': ()}
    config = config_lib.replaced(spec.config, changes)
    return dataclasses.replace(spec, config=config)
