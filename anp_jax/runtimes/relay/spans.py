"""What every station did when: a line each in WORKDIR/spans/PROCESS.jsonl."""

import contextlib
import glob
import json
import os
import threading
import time

FOLDER = 'spans'


class Spans:
  """Writes one process's spans."""

  def __init__(self, workdir: str, process: int):
    """Opens the file, behind what is in it."""
    folder = os.path.join(workdir, FOLDER)
    os.makedirs(folder, exist_ok=True)
    self._file = open(os.path.join(folder, f'{process}.jsonl'), 'a')
    self._lock = threading.Lock()

  @contextlib.contextmanager
  def during(self, station: int, what: str, model: int, lap: int | None):
    """Times what happens within; yields a dict for what else is to be kept.

    Args:
      station: where.
      what: 'prepare', 'train', 'save', 'score' or 'send'; beside these,
        'compile' for a model that is to come.
      model: its index.
      lap: from 0; of a score, the laps done.
    """
    more = {}
    start = time.time()
    try:
      yield more
    finally:
      record = {
        'station': station, 'what': what, 'model': model, 'lap': lap,
        'start': start, 'end': time.time(), **more,
      }  # fmt: skip
      with self._lock, contextlib.suppress(OSError, ValueError):
        self._file.write(json.dumps(record) + '\n')
        self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    with self._lock:
      self._file.close()


def read(workdir: str) -> list[dict]:
  """All spans of a run, by their start; torn lines are left out."""
  found = []
  for path in glob.glob(os.path.join(workdir, FOLDER, '*.jsonl')):
    with open(path) as f:
      for line in f:
        with contextlib.suppress(ValueError):
          found.append(json.loads(line))
  return sorted(found, key=lambda r: r['start'])
