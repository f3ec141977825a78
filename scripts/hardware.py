"""Looks for GPUs and TPUs and says which build of JAX serves them.

Standard library only, like `setup.py`, which is its user.
"""

from __future__ import annotations

import contextlib
import glob
import os
import pathlib
import shutil
import subprocess
from typing import NamedTuple

CUDA13_DRIVER = (580,)
CUDA12_DRIVER = (525,)
CUDA13_CAPABILITY = (7, 5)  # Turing.
CUDA12_CAPABILITY = (5, 2)  # Maxwell, the oldest JAX's wheels serve.
LEFT_BY_CUDA13 = (
  'CUDA 13 no longer serves Maxwell, Pascal and Volta: GTX 9xx and 10xx, '
  'Titan X/Xp/V, M40, P4, P40, P100, V100'
)


class Gpu(NamedTuple):
  """One line of nvidia-smi. Versions are tuples of integers."""

  name: str
  driver: tuple[int, ...]
  capability: tuple[int, ...] | None  # None where the driver cannot tell.


def parse_version(text: str) -> tuple[int, ...] | None:
  """'580.65.06' -> (580, 65, 6); None for text such as '[N/A]'."""
  try:
    return tuple(int(part) for part in text.strip().split('.'))
  except ValueError:
    return None


def dotted(version) -> str:
  """(580, 65) -> '580.65'."""
  return '.'.join(str(part) for part in version)


def parse_gpus(csv: str) -> list[Gpu]:
  """Reads lines of nvidia-smi: driver_version, [compute_cap,] name."""
  gpus = []
  for line in csv.splitlines():
    driver_text, _, rest = line.partition(',')
    driver = parse_version(driver_text)
    if driver is None:
      continue  # nvidia-smi writes its errors to stdout, too.
    capability_text, comma, name = rest.partition(',')
    if not comma:
      capability_text, name = '', rest
    gpus.append(Gpu(name.strip(), driver, parse_version(capability_text)))
  return gpus


def choose(gpus, has_tpu: bool) -> tuple[str, str]:
  """The build of JAX that serves this machine, and why, in one line."""
  if not gpus:
    if has_tpu:
      return 'tpu', 'TPU devices found'
    return 'cpu', (
      'no GPU or TPU seen here; on a login node name what its compute nodes '
      'have, e.g. ACCELERATOR=cuda13'
    )
  driver = gpus[0].driver
  # A card too old for any wheel, say one that only drives a display, does not
  # take its newer neighbour down with it.
  served = [gpu for gpu in gpus if gpu.capability is None or gpu.capability >= CUDA12_CAPABILITY]
  if not served:
    return 'cpu', (
      f'{_describe(gpus[0])}: JAX needs compute capability '
      f'{dotted(CUDA12_CAPABILITY)} or newer, so this is the CPU build'
    )
  if driver < CUDA12_DRIVER:
    return 'cpu', (
      f'{_describe(served[0])}: JAX needs driver {dotted(CUDA12_DRIVER)} or '
      'newer, so this is the CPU build'
    )
  # The oldest card decides: an unknown one counts as the oldest.
  oldest = min(served, key=lambda gpu: gpu.capability or ())
  if driver < CUDA13_DRIVER:
    return 'cuda12', (f'{_describe(oldest)}: CUDA 13 needs driver {dotted(CUDA13_DRIVER)} or newer')
  if oldest.capability is None or oldest.capability < CUDA13_CAPABILITY:
    return 'cuda12', f'{_describe(oldest)}: {LEFT_BY_CUDA13}'
  return 'cuda13', _describe(oldest)


def detect() -> tuple[str, str]:
  """Looks at this machine and chooses."""
  return choose(_find_gpus(), _find_tpu())


def _find_gpus() -> list[Gpu]:
  if not shutil.which('nvidia-smi'):
    return []
  # Drivers before 510 do not know compute_cap and answer with an error.
  for fields in ('driver_version,compute_cap,name', 'driver_version,name'):
    query = ['nvidia-smi', f'--query-gpu={fields}', '--format=csv,noheader']
    try:
      answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
      return []
    gpus = parse_gpus(answer.stdout) if answer.returncode == 0 else []
    if gpus:
      return gpus
  return []


def _find_tpu() -> bool:
  # Not /dev/accel itself: that is a directory which other makers' accelerators
  # use, a laptop's NPU for one. vfio serves any passed-through device, so it
  # counts only with Google's vendor number or a TPU's environment.
  if glob.glob('/dev/accel[0-9]*'):
    return True
  if not glob.glob('/dev/vfio/[0-9]*'):
    return False
  if os.environ.get('TPU_ACCELERATOR_TYPE') or os.environ.get('TPU_NAME'):
    return True
  for vendor in glob.glob('/sys/bus/pci/devices/*/vendor'):
    with contextlib.suppress(OSError):
      if pathlib.Path(vendor).read_text().strip() == '0x1ae0':
        return True
  return False


def _describe(gpu: Gpu) -> str:
  capability = 'unknown' if gpu.capability is None else dotted(gpu.capability)
  return f'{gpu.name}, driver {dotted(gpu.driver)}, compute capability {capability}'
