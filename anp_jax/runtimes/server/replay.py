"""Reproduces an asynchronous run in one process, from its log.

  python -m anp_jax.runtimes.server.replay WORKDIR

computes every gradient again from the versions that its worker read, applies
them in the order in which they were applied, and compares the weights with the
workdir's newest checkpoint: bit for bit, on a CPU of the kind that trained.
"""

import argparse
import os
import sys

import jax
import numpy as np

from anp_jax import config as config_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.runtimes.server import log as log_lib
from anp_jax.system import xla_flags


def replay(config, records: list[dict], version: int):
  """The state after the first `version` updates of a log.

  Args:
    config: of the run.
    records: of the log; it must begin at version 0.
    version: to stop at.

  Returns:
    TrainState of NumPy arrays.

  Raises:
    ConfigError: if the log does not tell all of that.
  """
  # Heavy: only once the input is known to be good.
  from anp_jax.runtimes.server import setup as setup_lib
  from anp_jax.runtimes.server import shard as shard_lib

  updates = {r['order']: r for r in records if 'order' in r}
  missing = next((n for n in range(version) if n not in updates), None)
  if missing is not None:
    raise config_lib.ConfigError(
      f'{log_lib.NAME} has no update {missing}: a replay needs all of them, so '
      'not a run that another strategy began, or one whose log was cut'
    )
  state = None
  for part, stop in _terms(records, version):
    # Logs of earlier versions do not tell: there was none.
    setup = setup_lib.create(_settled(config, part), part.get('ahead', 0.0))
    if state is None:
      state = jax.device_get(setup.start()[0])
    first = int(state.step)
    taken = [updates[n] for n in range(first, stop)]
    states = _replayed(setup, part['shards'], state, taken)
    state = shard_lib.whole(setup.flats, setup.shards, states, setup.parts.like)
  return state


def _terms(records, version):
  """The settings of each part of a run, and the version where it ends."""
  starts = [r for r in records if 'start' in r and r['start'] < version]
  stops = [*(r['start'] for r in starts[1:]), version]
  return zip(starts, stops)


def _settled(config, part):
  """The config as it was in a part of the run."""
  config = config.copy_and_resolve_references()
  # Schedules end with the run. Logs of earlier versions do not tell when.
  config.duration = part.get('duration', config.duration)
  config.batch_size = part['batch_size']
  config.strategy.servers = part['servers']
  config.strategy.wire_dtype = part['wire_dtype']
  config.strategy.compensation = part['compensation']
  return config


def _replayed(setup, shards, state, updates):
  """SliceStates after the updates of one term."""
  now = [shard.start(state) for shard in setup.shards]
  version = int(state.step)
  program = setup.program(shards)
  last = _last_reads(updates, len(now))
  # By server: version -> what a worker may still read of it.
  kept = [{version: s} for s in now]
  tickets = [part['ticket'] for u in updates for part in u['parts']]
  rows = np.arange(setup.config.batch_size).reshape(shards, -1)

  def where(count):
    step, shard = tickets[min(count, len(tickets) - 1)]
    return step, rows[shard]

  feed = setup.feed(where, shards)
  try:
    for update in updates:
      parts = update['parts']
      made = []
      for part in parts:
        read = [k[v] for k, v in zip(kept, part['reads'], strict=True)]
        weights = np.concatenate(
          [
            part
            for shard, of in zip(setup.shards, read, strict=True)
            for part in shard.weights(of)
          ]
        )
        gradient, term, _ = program(
          weights, np.asarray(read[0].stats), part['ticket'][0], next(feed)
        )
        made.append((gradient, term))
      for i, shard in enumerate(setup.shards):
        cut = slice(shard.part.start, shard.part.stop)
        now[i], _ = shard.apply(
          now[i],
          [gradient[cut] for gradient, _ in made],
          [term[: shard.stats_size] for _, term in made],
          [part['weight'] for part in parts],
          version - parts[0]['reads'][0],
        )
        kept[i][version + 1] = now[i]
        kept[i] = {v: k for v, k in kept[i].items() if last[i].get(v, version)
                   > version or v == version + 1}  # fmt: skip
      version += 1
  finally:
    feed.close()
  return now


def _last_reads(updates, servers):
  """By server: version -> the last update of which a part read it."""
  last = [{} for _ in range(servers)]
  for update in updates:
    for part in update['parts']:
      for i, version in enumerate(part['reads']):
        last[i][version] = update['order']
  return last


def main(argv: list[str]) -> int:
  """Returns the exit status: 0 the same bits, 1 others, 2 bad input."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('workdir', help='of the run, or its ' + log_lib.NAME)
  given = parser.parse_args(argv).workdir
  workdir = os.path.dirname(given) if given.endswith('.jsonl') else given
  try:
    return _compare(workdir)
  except config_lib.ConfigError as e:
    print(f'error: {e}', file=sys.stderr)
    return 2


def _compare(workdir):
  from anp_jax.checkpoint import run_dir as workdir_lib

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
  config = config_lib.from_flat(workdir_lib.saved_config(workdir))
  version, saved = _newest(workdir)
  state = replay(config, records, version)
  found = {
    mesh_lib.path_name(path): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state)
  }
  for name, leaf in found.items():
    if leaf.tobytes() != saved[name].tobytes():
      worst = np.abs(leaf.astype(float) - saved[name].astype(float)).max()
      print(f'{name} differs after {version} updates, by up to {worst:.3g}')
      return 1
  stale = log_lib.staleness(records)
  text = ', '.join(f'{s}: {stale[s]}' for s in sorted(stale))
  print(f'{version} updates, the same bits in all {len(found)} leaves')
  print(f'staleness of gradients: {text}')
  return 0


def _newest(workdir):
  """(version, leaves by name) of the newest checkpoint."""
  import orbax.checkpoint as ocp

  from anp_jax.checkpoint import manager

  folder = os.path.join(os.path.abspath(workdir), manager.NEWEST)
  steps = [int(n) for n in os.listdir(folder) if n.isdigit()]
  if not steps:
    raise config_lib.ConfigError(f'{workdir} has no checkpoint to compare with')
  reader = ocp.PyTreeCheckpointer()
  path = os.path.join(folder, str(max(steps)), 'state')
  tree = reader.metadata(path).item_metadata.tree
  kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
  saved = reader.restore(path, restore_args=kinds)['state']
  return max(steps), {
    mesh_lib.path_name(path): np.asarray(leaf)
    for path, leaf in jax.tree_util.tree_leaves_with_path(saved)
  }


if __name__ == '__main__':
  xla_flags.enable()
  sys.exit(main(sys.argv[1:]))
