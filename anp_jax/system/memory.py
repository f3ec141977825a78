"""Memory of this process, of its machine and of devices, without JAX."""

import contextlib


def of_process(field: str = 'VmRSS') -> int:
  """Returns the bytes of this process; 0 where a system does not tell.

  Args:
    field: 'VmRSS' now, 'VmHWM' the most since `reset_peak`. Not getrusage: its
      maximum is inherited from the process that started this one.
  """
  with contextlib.suppress(OSError), open('/proc/self/status') as f:
    for line in f:
      if line.startswith(field + ':'):
        return int(line.split()[1]) * 1024
  return 0


def reset_peak() -> None:
  """Forgets 'VmHWM' of `of_process`, where the system allows it."""
  with contextlib.suppress(OSError), open('/proc/self/clear_refs', 'w') as f:
    f.write('5')


def of_device(device, field: str) -> int:
  """Returns what JAX's allocator of a device tells; 0 where it does not.

  Args:
    device: jax.Device.
    field: 'bytes_limit' or 'peak_bytes_in_use', in bytes.
  """
  return (device.memory_stats() or {}).get(field, 0)
