"""Trainings that differ in numbers alone, made together by one process.

Each is an ordinary run in a workdir of its own, which an ordinary command can resume,
score or compare. On an accelerator one program computes many; on a CPU one after
another makes its steps.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math
import os
import sys

import jax
from ml_collections import ConfigDict
import numpy as np

from anp_jax import cluster, config as config_lib, experiment
from anp_jax.checkpoint import run_dir
from anp_jax.cluster import preemption
from anp_jax.config import members as members_lib, saved_run, strategy as strategy_lib
from anp_jax.data import sources, vocabulary as vocabulary_lib
from anp_jax.ensemble import device_examples, lane as lane_lib, member as member_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.reporting import summaries
from anp_jax.system import compile_cache, files, markdown, progress
from anp_jax.training import metric_labels

SUMMARY = 'ensemble.json'  # in the ensemble's workdir: scores by member, means and intervals


def run(invocation: strategy_lib.Invocation) -> dict:
  """Trains a member for each of config.ensemble.seeds, in WORKDIR/seedN.

  Returns:
    The mean of each metric over the members.

  Raises:
    ConfigError: if the config does not suit an ensemble.
    cluster.RunFailedError: if a member ended early; the others have been trained.
  """
  config, workdir = invocation.config, invocation.workdir
  seeds = config_lib.window(config.ensemble.seeds, least=0)
  configs = {
    os.path.join(workdir, f'seed{seed}'): config_lib.replaced(
      config, {'seed': seed, 'ensemble.seeds': ''}
    )
    for seed in seeds
  }
  if saved_run.has_checkpoints(workdir):
    text = 'has the checkpoints of one run; expected another folder for config.ensemble.seeds'
    raise config_lib.ConfigError(f'--workdir={workdir} {text}')
  devices = invocation.devices or jax.local_devices()
  ensemble = Ensemble(configs, invocation.processes, devices, config.ensemble.together)
  run_dir.claim_workdir(workdir, config, ensemble.vocabulary)
  scores, vote = ensemble.train()
  if vote > preemption.CONTINUE:
    reason = preemption.REASONS[vote]
    run_dir.mark_stopped(workdir, ensemble.step, ensemble.total_steps, reason)
    return {}
  return _summarize(workdir, scores)


class Ensemble:
  """Members on the devices of this process.

  Attributes:
    vocabulary: classes of the data.
    total_steps: updates of each member.
  """

  def __init__(
    self,
    configs: Mapping[str, ConfigDict],
    processes: cluster.Processes,
    devices: Sequence[jax.Device],
    together: int = 0,
  ):
    """Opens the data and all runs; nothing is compiled yet.

    Args:
      configs: config of each member by its workdir; they have one `config.members.program_key`.
      processes: this process, alone.
      devices: devices over which the members divide.
      together: most members of a program; 0: see `lane.Device`.

    Raises:
      ConfigError: if the config does not suit an ensemble, or a workdir belongs to
        another run.
    """
    first = next(iter(configs.values()))
    if processes.count > 1:
      text = f'config.ensemble.seeds: expected one process, not {processes.count}'
      raise config_lib.ConfigError(text)
    compile_cache.enable(first)
    self._processes = processes
    devices = devices[: len(configs)]
    opened = experiment.open(first, devices[:1])
    device_examples.check(opened.config, opened.source.kind)
    if len({members_lib.program_key(config) for config in configs.values()}) > 1:
      raise config_lib.ConfigError(
        f'config.data.imbalance={first.data.imbalance!r}: expected 1 where config.ensemble.seeds '
        'is set: each seed keeps other examples'
      )
    if opened.program.training.strategy_step.separate_programs:
      raise config_lib.ConfigError(
        f'config.strategy.name={first.strategy.name!r}: expected a strategy whose step is one '
        'program, such as sync, where config.ensemble.seeds is set'
      )
    self.vocabulary, self.total_steps = opened.source.vocabulary, opened.spec.total_steps
    evaluation = sources.open_source(first, training=False)
    self._members: list[member_lib.Member] = []
    self._lanes: list[lane_lib.Lane] = []
    items = [
      (workdir, config_lib.replaced(config, {'batch_size': opened.config.batch_size}))
      for workdir, config in configs.items()
    ]
    examples = device_examples.load(opened.config, opened.source)
    for i, device in enumerate(devices):
      mesh = mesh_lib.create(first, [device])
      shared = dataclasses.replace(opened, spec=dataclasses.replace(opened.spec, mesh=mesh))
      members = [
        member_lib.Member(shared, config, workdir, evaluation, processes)
        for workdir, config in items[i :: len(devices)]
      ]
      self._members += members
      lane_device = lane_lib.Device(shared, [config for _, config in items], examples, together)
      self._open_lanes(lane_device, members)

  def _open_lanes(self, device, members):
    """The lanes of a device: members that are at one step, as many as fit at once."""
    members = sorted(members, key=lambda member: member.step)
    for _, group in itertools.groupby(members, key=lambda member: member.step):
      waiting = [member for member in group if member.step < self.total_steps]
      while waiting:
        count = device.together(len(waiting))
        self._lanes.append(lane_lib.Lane(device, waiting[:count]))
        waiting = waiting[count:]

  @property
  def step(self) -> int:
    """The step that all members have reached that have not ended early."""
    steps = (lane.step for lane in self._lanes if not lane.is_finished)
    return min(steps, default=self.total_steps)

  def train(self) -> tuple[dict[str, dict[str, float]], int]:
    """Trains all members to their last step, or until a process is to stop.

    Returns:
      The scores of each member by its workdir, {} of one that ended early; and the vote.
    """
    vote = preemption.CONTINUE
    line = progress.LiveLine(sys.stdout)
    most = max((len(lane.members) for lane in self._lanes), default=0)
    devices = vocabulary_lib.counted(len({lane.device for lane in self._lanes}), 'device')
    line.log(f'{len(self._members)} members on {devices}, at most {most} in a program')
    with self._processes.handling_signals():
      while lanes := [lane for lane in self._lanes if not lane.is_finished]:
        lane = min(lanes, key=lambda lane: lane.step)
        has_begun = lane.step > lane.members[0].step
        self._processes.heartbeat('step' if has_begun else 'compiling', lane.step)
        lane.advance()
        line.show(f'step {self.step} of {self.total_steps}')
        vote = self._processes.vote()
        if vote > preemption.CONTINUE:
          for lane in lanes:
            lane.stop()
          break
      if self.step >= self.total_steps:  # a stop that came too late
        vote = preemption.CONTINUE
      ends = {m: lane.step for lane in self._lanes for m in lane.members}
      scores = {
        m.recorder.workdir: m.finish(ends.get(m, self.total_steps), vote) for m in self._members
      }
    line.close(keep=False)
    return scores, vote


def _summarize(workdir, scores):
  """Writes and prints the members' scores; returns their means."""
  metrics = next((s for s in scores.values() if s), {})
  names = metric_labels.names(metric_labels.labels(metrics))
  table, means, intervals = [('metric', 'mean', 'lowest', 'highest', '95 % interval +-')], {}, {}
  for name in names:
    values = [s[name] for s in scores.values() if s]
    summary = summaries.summarize(values)
    means[name], intervals[name] = summary.mean, summary.interval
    interval = '-' if summary.interval is None else f'{summary.interval:.2g}'
    numbers = (f'{x:.4g}' for x in (summary.mean, np.min(values), np.max(values)))
    table.append((names[name], *numbers, interval))
  members = {name: _finite(values) for name, values in scores.items()}
  content = {'members': members, 'mean': _finite(means), 'interval': _finite(intervals)}
  files.write_json(os.path.join(workdir, SUMMARY), content)
  print(markdown.plain(table, 'lr'))
  print(f'compare them: anp-compare {os.path.join(workdir, "seed*")}')
  ended = [name for name, values in scores.items() if not values]
  if ended:
    names = ', '.join(ended)
    raise cluster.RunFailedError(f'{len(ended)} of {len(scores)} members ended early: {names}')
  return means


def _finite(values):
  return {k: v if v is not None and math.isfinite(v) else None for k, v in values.items()}
