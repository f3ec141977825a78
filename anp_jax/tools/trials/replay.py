"""Reproduces an asynchronous run in one process, from its log.

  python -m anp_jax.tools.trials.replay WORKDIR

computes every gradient again from the versions that its worker read, applies
them in the logged order, and compares the weights with the
workdir's newest checkpoint: bit for bit, on a CPU of the kind that trained.
"""

import os
import sys
from typing import Any

import jax
import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, exits, saved_run, trust
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from anp_jax.runtimes.parameter_server import log as log_lib, parameter_server_strategy
from anp_jax.system import xla_flags


def replay(
  config: ml_collections.ConfigDict, records: list[dict], version: int
) -> state_lib.TrainState:
  """Returns the state after the first `version` updates of a log, as NumPy arrays.

  Args:
    config: config of the run.
    records: records of the log, which must begin at version 0.
    version: number of updates.

  Raises:
    ConfigError: if the log has not all of these updates.
  """
  # Heavy: only once the input is known to be good.
  from anp_jax.runtimes.parameter_server import look_ahead, setup as setup_lib

  updates = {r['order']: r for r in records if 'order' in r}
  missing = next((n for n in range(version) if n not in updates), None)
  if missing is not None:
    raise config_lib.ConfigError(
      f'{log_lib.NAME} has no update {missing}: a replay needs all of them, so '
      'not a run that another strategy began, or one whose log was cut'
    )
  state: Any = None
  for session, stop in _sessions(records, version):
    # The log counts: keys may have changed since.
    ahead = look_ahead.Settings(**session['look_ahead'])
    setup = setup_lib.create(_session_config(config, session), ahead)
    if state is None:
      state = jax.device_get(setup.new_state()[0])
    first = int(state.step)
    state = _replay_session(setup, session, state, [updates[n] for n in range(first, stop)])
  return state


def _sessions(records, version):
  """Pairs of a session's settings and the version at which it ends."""
  starts = [r for r in records if 'start' in r and r['start'] < version]
  stops = [*(r['start'] for r in starts[1:]), version]
  return zip(starts, stops)


def _session_config(config, session):
  """The config as it was in a session of the run."""
  changes = {
    'duration': session['duration'],  # schedules end with the run
    'batch_size': session['batch_size'],
    # One server makes the same weights as several: no bit depends on it.
    'strategy.name': 'parameter_server',
    'strategy.servers': 1,
    'strategy.simulate.workers': 0,
  }
  return config_lib.replaced(config, changes | session['changeable'])


def _replay_session(setup, session, state, updates):
  """The state after the updates of one session."""
  from anp_jax.runtimes.parameter_server import slice_optimizer

  (optimizer,), data_shards = setup.optimizers, session['shards']
  slices = setup.layout.params.slices(session['servers'])
  state, version = optimizer.start(state), int(state.step)
  program = setup.gradient_program(data_shards)
  last_reads = log_lib.last_reads([update['parts'] for update in updates], version + 1)
  # Version -> weights and statistics that a worker may still read.
  sent = {version: _sent(optimizer, state)}
  feed = _feed(setup, data_shards, updates)
  try:
    for update in updates:
      contributions, results = update['parts'], []
      for contribution in contributions:
        reads = contribution['reads']
        weights = np.concatenate([sent[read][0][part] for part, read in zip(slices, reads)])
        results.append(program(weights, sent[reads[0]][1], contribution['ticket'][0], next(feed)))
      gradients, stats_deltas, _ = zip(*results)
      state, _ = optimizer.apply(state, gradients, stats_deltas, contributions)
      version += 1
      sent[version] = _sent(optimizer, state)
      sent = {v: s for v, s in sent.items() if last_reads.get(v, 0) > version}
  finally:
    feed.close()
  return slice_optimizer.join(setup.layout, [optimizer], [state])


def _sent(optimizer, state):
  """The weights and statistics that servers send of a state."""
  return np.concatenate(optimizer.weights(state)), np.asarray(state.stats)


def _feed(setup, data_shards, updates):
  """The batches of a session's gradients, in the order of the log."""
  tickets = [c['ticket'] for update in updates for c in update['parts']]
  return setup.feed(lambda count: tickets[min(count, len(tickets) - 1)], data_shards)


@exits.with_status()
def main(arguments: list[str]) -> int:
  """Returns the exit status: 0 the same bits, 1 other bits, 2 bad input."""
  parser = argument_parser.Parser(
    prog='python -m anp_jax.tools.trials.replay', description=__doc__.splitlines()[0]
  )
  parser.add_argument('workdir', help='workdir of the run, or its ' + log_lib.NAME)
  trust.add_flag(parser)
  flags = parser.parse(arguments)
  path = flags.workdir
  return _compare(os.path.dirname(path) or '.' if path.endswith('.jsonl') else path)


def _compare(workdir):
  records = log_lib.read(workdir)
  devices = {r['devices'] for r in records if 'order' in r}
  if len(devices) != 1:
    raise config_lib.ConfigError(
      f'{os.path.join(workdir, log_lib.NAME)}: expected updates by workers of '
      f'one number of devices, found {sorted(devices) or "none"}'
    )
  # The gradient's program is that of a worker, on as many devices.
  jax.config.update('jax_num_cpu_devices', devices.pop())
  jax.config.update('jax_platforms', 'cpu')
  file = os.path.join(workdir, saved_run.FILE)
  saved_config = trust.from_file(saved_run.read(workdir), file)
  config = config_lib.from_flat(saved_config)
  version, saved = newest_arrays(workdir)
  state = replay(config, records, version)
  leaves = mesh_lib.leaves_by_name(jax.tree.map(np.asarray, state))
  for name, leaf in leaves.items():
    expected = saved[f'state/{name}']
    if leaf.tobytes() != expected.tobytes():
      worst = np.abs(leaf.astype(float) - expected.astype(float)).max()
      print(f'{name} differs after {version} updates, by up to {worst:.3g}')
      return 1
  counts = log_lib.staleness(records)
  text = ', '.join(f'{s}: {counts[s]}' for s in sorted(counts))
  print(f'{version} updates, the same bits in all {len(leaves)} leaves')
  print(f'staleness of gradients: {text}')
  return 0


def newest_arrays(workdir: str) -> tuple[int, dict[str, np.ndarray]]:
  """Returns the newest checkpoint's step and arrays, by names such as 'state/step'.

  Raises:
    ConfigError: if there is none.
  """
  import orbax.checkpoint as ocp

  folder = os.path.join(os.path.abspath(workdir), saved_run.NEWEST)
  steps = saved_run.saved_steps(folder)
  if not steps:
    raise config_lib.ConfigError(f'{workdir} has no checkpoint to compare with')
  reader = ocp.PyTreeCheckpointer()
  path = os.path.join(folder, str(steps[-1]), 'state')
  tree = reader.metadata(path).item_metadata.tree
  kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
  saved = reader.restore(path, restore_args=kinds)
  return steps[-1], mesh_lib.leaves_by_name(jax.tree.map(np.asarray, saved))


if __name__ == '__main__':
  # The number of threads decides how sums are split.
  xla_flags.enable(spare=parameter_server_strategy.spare_threads())
  sys.exit(main(sys.argv[1:]))
