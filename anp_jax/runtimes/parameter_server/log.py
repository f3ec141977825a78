"""The run's log: from which version a gradient was read, and when applied.

One JSON object a line. {"start": n, ...} begins a session of the run at version
n and holds the settings that a replay needs; {"order": n, "devices": of a
worker, "parts": [...]} is the update from version n to n + 1, made of
contributions {"ticket": [step, data shard], "worker": name, "reads": [version
read from each server], "weight": examples}, in a simulation also "seconds",
simulated, from the run's start to the update.
"""

import collections
from collections.abc import Sequence
import contextlib
import json
import os
from typing import Any

import ml_collections

from anp_jax import config as config_lib
from anp_jax.system import files

NAME = 'server.jsonl'
# The last bin of a histogram of staleness: staler updates are counted together.
_STALEST = 15


class UpdateLog:
  """Appends to the log of a workdir."""

  def __init__(self, workdir: str, version: int, settings: dict):
    """Drops the records at or after `version`, and begins a session there.

    Args:
      workdir: folder of the run.
      version: updates that the run's checkpoint has.
      settings: JSON values, from `session_settings`.
    """
    path = os.path.join(workdir, NAME)
    records = [r for r in read(workdir) if r.get('start', r.get('order', 0)) < version]
    lines = map(json.dumps, [*records, {'start': version, **settings}])
    files.write_atomic(path, '\n'.join(lines) + '\n')
    self._file = open(path, 'a')

  def append(self, order: int, devices: int, contributions: list[dict]) -> None:
    """Writes one update; a crash tears the last line at most."""
    record = {'order': order, 'devices': devices, 'parts': contributions}
    self._file.write(json.dumps(record) + '\n')
    self._file.flush()

  def sync(self) -> None:
    """Returns once all lines are on the disk: a checkpoint relies on them."""
    os.fsync(self._file.fileno())

  def close(self) -> None:
    """Closes the file; what a full disk does not take was refused before."""
    with contextlib.suppress(OSError):
      self._file.close()


def read(workdir: str) -> list[dict]:
  """Returns the records of a workdir's log, in order, without a torn line."""
  return files.read_json_lines(os.path.join(workdir, NAME))


def session_settings(
  config: ml_collections.ConfigDict, data_shards: int, look_ahead: Any, workers: int
) -> dict:
  """Returns what a replay needs to know of a session, as JSON values.

  Args:
    config: config of the run, with its batch size.
    data_shards: parts of a batch that an update is made of.
    look_ahead: `look_ahead.Settings`.
    workers: workers of the session.
  """
  changeable = config_lib.changeable(config)
  return {
    'duration': config.duration,
    'servers': config.strategy.servers,
    'shards': data_shards,
    'batch_size': config.batch_size,
    'look_ahead': vars(look_ahead),
    'workers': workers,
    # The keys that --change may name.
    'changeable': {k: v for k, v in config_lib.flat(config).items() if k in changeable},
  }


def used_tickets(records: list[dict], version: int, data_shards: int) -> set[tuple[int, int]]:
  """Returns the tickets with examples that the first `version` updates have used.

  An update that is not in the log was made by a strategy that takes the batch
  of step n for update n.

  Args:
    records: records of the log.
    version: number of updates.
    data_shards: parts of a batch of these tickets; those of the log may be others.
  """
  logged = {r['order']: [p['ticket'] for p in r['parts']] for r in records if 'order' in r}
  used = set()
  for tickets in (logged.get(n, [(n, 0)]) for n in range(version)):
    for step, shard in tickets:
      first = shard * data_shards // len(tickets)
      end = -(-(shard + 1) * data_shards // len(tickets))
      used |= {(step, i) for i in range(first, end)}
  return used


def simulated_seconds(records: list[dict], version: int) -> float:
  """Returns when the update to a version was made; 0 if the log has no time."""
  parts: list[dict] = next((r['parts'] for r in records if r.get('order') == version - 1), [])
  return max((part.get('seconds', 0.0) for part in parts), default=0.0)


def last_reads(updates: list[list[dict]], version: int) -> dict[int, int]:
  """Returns, by version that gradients read, the version that the last of them made.

  Args:
    updates: contributions of each update.
    version: version that the first of them makes.
  """
  return {
    read: order
    for order, contributions in enumerate(updates, version)
    for contribution in contributions
    for read in contribution['reads']
  }


def staleness_metrics(staleness: Sequence[int]) -> dict[str, float]:
  """Returns the metrics of some gradients' staleness: its mean, and how many had which."""
  counts = collections.Counter(min(n, _STALEST) for n in staleness)
  histogram = {f'staleness_{n}': counts[n] for n in sorted(counts)}
  return {'staleness': sum(staleness) / len(staleness), **histogram}


def staleness(records: list[dict]) -> collections.Counter:
  """Counts gradients by their staleness on server 0.

  Returns:
    {updates applied between reading and applying: gradients}.
  """
  return collections.Counter(
    r['order'] - contribution['reads'][0]
    for r in records
    if 'order' in r
    for contribution in r['parts']
  )
