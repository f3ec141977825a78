"""The run's log: which gradient was read from where, and applied when.

One JSON object a line. {"start": n, ...} begins a part of the run at version n
and holds the settings that a replay needs; {"order": n, "devices": of a worker,
"parts": [...]} is the update from version n to n + 1, made of parts {"ticket":
[step, shard], "worker": name, "reads": [version read from each server],
"weight": examples}.
"""

import collections
import json
import os

NAME = 'server.jsonl'


class Log:
  """Appends to the log of a workdir."""

  def __init__(self, workdir: str, version: int, settings: dict):
    """Takes back what is at or after `version`, and begins a part there.

    Args:
      workdir: of the run.
      version: updates that the run's checkpoint has.
      settings: JSON values.
    """
    path = os.path.join(workdir, NAME)
    kept = [
      r for r in read(workdir) if r.get('start', r.get('order')) < version
    ]
    with open(path + '.new', 'w') as f:
      for record in [*kept, {'start': version, **settings}]:
        f.write(json.dumps(record) + '\n')
    os.replace(path + '.new', path)
    self._file = open(path, 'a')

  def append(self, order: int, devices: int, parts: list[dict]) -> None:
    """Writes one update; a crash tears the last line at most."""
    record = {'order': order, 'devices': devices, 'parts': parts}
    self._file.write(json.dumps(record) + '\n')
    self._file.flush()

  def sync(self) -> None:
    """Returns once all lines are on the disk: a checkpoint relies on them."""
    os.fsync(self._file.fileno())

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def read(workdir: str) -> list[dict]:
  """The records of a workdir's log, in order; a torn last line left out."""
  path = os.path.join(workdir, NAME)
  if not os.path.exists(path):
    return []
  with open(path) as f:
    lines = f.read().split('\n')
  # What follows the last newline was not written to its end.
  return [json.loads(line) for line in lines[:-1] if line]


def applied(records: list[dict], version: int) -> set[int]:
  """Steps whose batches the first `version` updates have used.

  An update that is not in the log was made by a strategy that takes the batch
  of step n for update n.
  """
  steps = {
    r['order']: r['parts'][0]['ticket'][0] for r in records if 'order' in r
  }
  return {steps.get(n, n) for n in range(version)}


def staleness(records: list[dict]) -> collections.Counter:
  """How many gradients were how stale, on server 0.

  Returns:
    {updates applied between reading and applying: parts}.
  """
  return collections.Counter(
    r['order'] - part['reads'][0]
    for r in records
    if 'order' in r
    for part in r['parts']
  )
