"""Arrow files: mapped into memory, and those that are made once."""

from collections.abc import Callable
import os

import pyarrow as pa

from anp_jax import config as config_lib
from anp_jax.system import files

FOLDER = 'tables'


def ensure(data_dir: str, name: str, build: Callable[[str], None]) -> str:
  """The path of a stored table, which is made if it is missing.

  It appears under its name when it is whole. Processes of one host wait for
  the first that makes it; of several hosts each does, and all make the same.

  Args:
    data_dir: the data folder; made if missing.
    name: which tells all that the table depends on.
    build: writes it as an Arrow file to a path.

  Raises:
    ConfigError: if the folder cannot be written to; whatever `build` raises.
  """
  folder = os.path.join(os.path.abspath(data_dir), FOLDER)
  path = os.path.join(folder, f'{name}.arrow')
  if os.path.exists(path):
    return path
  try:
    os.makedirs(folder, exist_ok=True)
    with files.lock(os.path.join(folder, '.lock')):
      if not os.path.exists(path):
        with files.atomic_path(path) as draft:
          build(draft)
  except OSError as e:
    raise config_lib.ConfigError(
      f'{path} cannot be written ({e.strerror or e}); config.data.dir names another folder'
    ) from e
  return path


def read(path: str) -> pa.Table:
  """The table of an Arrow file or stream, mapped into memory.

  Raises:
    ConfigError: if it is missing or damaged.
  """
  try:
    # The mapping outlives its file, which would hold a descriptor.
    with pa.memory_map(path) as data:
      try:
        return pa.ipc.open_file(data).read_all()
      except pa.ArrowInvalid:
        data.seek(0)
        return pa.ipc.open_stream(data).read_all()
  except (OSError, pa.ArrowInvalid) as e:
    raise config_lib.ConfigError(
      f'{path} cannot be read as an Arrow file: {str(e).splitlines()[0]}'
    ) from e
