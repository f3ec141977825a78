"""Event files: what TensorBoard shows of a run."""

import contextlib
import os
import time


class EventFile:
  """A file of events, which TensorBoard shows with those before it."""

  def __init__(self, folder: str, start_step: int):
    """Opens the file; events after start_step in older files are purged.

    Args:
      folder: folder of the files; one process writes to it at a time.
      start_step: steps that were made before.

    Raises:
      OSError: if it cannot be written.
    """
    # It imports torch wherever that is installed: seconds of a start.
    import tensorboardX

    # A file is named after the second and the host, and one that exists is
    # emptied: without the suffix a quick restart erases what it continues. They
    # are read in the order of their names.
    self._writer = tensorboardX.SummaryWriter(
      folder,
      purge_step=start_step + 1 if start_step else 0,
      filename_suffix=f'.{time.time_ns()}.{os.getpid()}',
      flush_secs=10,
      # Endless: where the disk is full its thread ends, and a queue that
      # nobody reads would hold the run up once it is full.
      max_queue=0,
    )

  def write(
    self, kind: str, step: int, values: dict[str, float], when: float | None = None
  ) -> None:
    """Adds values of a step, measured at a time; None: now."""
    for name, value in values.items():
      self._writer.add_scalar(f'{kind}/{name}', value, step, when)

  def close(self) -> None:
    """Writes pending events, and closes the file."""
    with contextlib.suppress(OSError):  # a full disk
      self._writer.close()
