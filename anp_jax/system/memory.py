"""Memory of arrays, of this process, of its machine and of devices, without JAX."""

import contextlib
from typing import Any


def of_array(array: Any) -> int:
  """Returns the bytes of an array, or of a shape with a dtype."""
  return array.size * array.dtype.itemsize


def of_process(field: str = 'VmRSS') -> int:
  """Returns the bytes of this process; 0 where they are unknown.

  Args:
    field: 'VmRSS' for the current bytes, 'VmHWM' for the peak since `reset_peak`.
      getrusage would inherit its maximum from the parent process.
  """
  with contextlib.suppress(OSError), open('/proc/self/status') as f:
    for line in f:
      if line.startswith(field + ':'):
        return int(line.split()[1]) * 1024
  return 0


def reset_peak() -> None:
  """Resets 'VmHWM' of `of_process`, where the system allows it."""
  with contextlib.suppress(OSError), open('/proc/self/clear_refs', 'w') as f:
    f.write('5')


def of_device(device: Any, field: str) -> int:
  """Returns a number of JAX's allocator of a device; 0 where it is unknown.

  Args:
    device: jax.Device.
    field: 'bytes_limit' or 'peak_bytes_in_use', in bytes.
  """
  return (device.memory_stats() or {}).get(field, 0)
