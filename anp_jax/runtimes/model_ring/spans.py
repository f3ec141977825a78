"""Time spans of the stations' work: a line each in WORKDIR/spans/PROCESS.jsonl."""

from collections.abc import Iterator
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
    """Creates the folder; a file that exists is continued."""
    folder = os.path.join(workdir, _FOLDER)
    os.makedirs(folder, exist_ok=True)
    self._path = os.path.join(folder, f'{process}.jsonl')
    self._lock = threading.Lock()

  @contextlib.contextmanager
  def record(
    self, station: int, what: str, model: int, lap: int | None
  ) -> Iterator[dict[str, object]]:
    """Times its block; yields a dict for further fields of the line.

    Args:
      station: number of the station.
      what: 'prepare', 'train', 'save', 'score' or 'send'.
      model: index of the model.
      lap: lap, from 0; for a score, the laps done.
    """
    fields: dict[str, object] = {}
    start = time.time()
    try:
      yield fields
    finally:
      line = {'station': station, 'what': what, 'model': model, 'lap': lap}
      line |= {'start': start, 'end': time.time(), **fields}
      with self._lock, contextlib.suppress(OSError):  # a full disk
        files.append_json_line(self._path, line)


def read(workdir: str) -> list[dict]:
  """Returns all spans of a run, by their start; torn lines are left out."""
  paths = glob.glob(os.path.join(workdir, _FOLDER, '*.jsonl'))
  spans = [span for path in paths for span in files.read_json_lines(path)]
  return sorted(spans, key=lambda span: span['start'])
