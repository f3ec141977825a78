"""What every station did when: a line each in WORKDIR/spans/PROCESS.jsonl."""

import contextlib
import glob
import os
import threading
import time

from anp_jax.system import files

_FOLDER = 'spans'


class Spans:
  """Writes one process's spans; any thread may."""

  def __init__(self, workdir: str, process: int):
    """Makes the folder; a file that exists is continued."""
    folder = os.path.join(workdir, _FOLDER)
    os.makedirs(folder, exist_ok=True)
    self._path = os.path.join(folder, f'{process}.jsonl')
    self._lock = threading.Lock()

  @contextlib.contextmanager
  def record(self, station: int, what: str, model: int, lap: int | None):
    """Times what happens within; yields a dict for further fields of the line.

    Args:
      station: where.
      what: 'prepare', 'train', 'save', 'score' or 'send'.
      model: its index.
      lap: from 0; of a score, the laps done.
    """
    fields = {}
    start = time.time()
    try:
      yield fields
    finally:
      line = {
        'station': station,
        'what': what,
        'model': model,
        'lap': lap,
        'start': start,
        'end': time.time(),
        **fields,
      }
      with self._lock, contextlib.suppress(OSError):  # a full disk
        files.append_json_line(self._path, line)


def read(workdir: str) -> list[dict]:
  """Returns all spans of a run, by their start; torn lines are left out."""
  paths = glob.glob(os.path.join(workdir, _FOLDER, '*.jsonl'))
  spans = [span for path in paths for span in files.read_json_lines(path)]
  return sorted(spans, key=lambda span: span['start'])
