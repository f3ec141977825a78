"""Arrow files: mapped into memory, and those that are made once."""

from collections.abc import Callable, Iterable
import hashlib
import json
import os

import pyarrow as pa

from anp_jax import config as config_lib
from anp_jax.system import files

FOLDER = 'tables'


def ensure(data_dir: str, kind: str, inputs: Iterable[str], build: Callable[[str], None]) -> str:
  """The path of a stored table, which is made if it is missing.

  It appears under its name when it is whole. Processes of one host wait for
  the first that makes it; of several hosts each does, and all make the same.

  Args:
    data_dir: data folder; made if missing.
    kind: name of the table, with the version of its form.
    inputs: paths of the files that it is made from. If their names, sizes or
      times change, it is made again.
    build: writes the table as an Arrow file to a path.

  Raises:
    ConfigError: if the folder cannot be written to; whatever `build` raises.
  """
  key = json.dumps([(os.path.abspath(path), *files.state(path)) for path in inputs])
  digest = hashlib.sha256(key.encode()).hexdigest()[:32]
  folder = os.path.join(os.path.abspath(os.path.expanduser(data_dir)), FOLDER)
  path = os.path.join(folder, f'{kind}-{digest}.arrow')
  if os.path.exists(path):
    return path
  try:
    os.makedirs(folder, exist_ok=True)
    with files.lock(os.path.join(folder, '.lock')):
      files.remove_drafts(folder)
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
