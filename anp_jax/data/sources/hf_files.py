"""The files of a Hugging Face data set on disk, by split.

The library's `save_to_disk` leaves a folder of Arrow files for each split, its
`to_parquet` and the hub's sets are Parquet files that are named by the split.
"""

import dataclasses
import glob
import os
import re

from anp_jax import config as config_lib
from anp_jax.data.sources import splits
from anp_jax.system import files

_STATE, _SPLITS = 'state.json', 'dataset_dict.json'
_PARQUET = '.parquet'
# data/train-00000-of-00001.parquet, train-0.parquet, train.parquet
_NAME = re.compile(r'(.+?)(?:-\d+(?:-of-\d+)?)?\.parquet')


@dataclasses.dataclass(frozen=True)
class Files:
  """The files of a set, or of its split.

  Attributes:
    folder: folder that images outside of the files are relative to.
    paths: paths of the files, in order; all Arrow or all Parquet.
    is_split: whether they are those of one split; else of a set without splits.
  """

  folder: str
  paths: tuple[str, ...]
  is_split: bool

  @property
  def are_parquet(self) -> bool:
    """Whether they are Parquet files, which have no random access."""
    return self.paths[0].endswith(_PARQUET)


def find(path: str, split: str) -> Files:
  """The files of a split.

  Args:
    path: folder that `save_to_disk` made, folder of Parquet files, or pattern of
      Parquet files; the last, and a set that was saved without splits, have no
      splits.
    split: name, or another that the split usually goes by; '' for all of a set
      without splits.

  Raises:
    ConfigError: naming the folder, and the splits that it has.
  """
  if os.path.exists(os.path.join(path, _SPLITS)):
    names = files.read_json_object(os.path.join(path, _SPLITS)).get('splits')
    name = splits.choose(path, split, names or [], f'hf:{path}/')
    return dataclasses.replace(_saved(os.path.join(path, name)), is_split=True)
  if os.path.exists(os.path.join(path, _STATE)):
    splits.check_half(path, split)
    return _saved(path)
  if os.path.isdir(path):
    by_split = _parquet_files(path)
    paths = by_split[splits.choose(path, split, by_split)]
    return Files(path, tuple(paths), True)
  paths = sorted(glob.glob(path)) or [path]
  if not all(p.endswith(_PARQUET) and os.path.isfile(p) for p in paths):
    raise config_lib.ConfigError(
      f'{path} is no data set of Hugging Face: expected a folder made by '
      'save_to_disk, or one of Parquet files, or Parquet files by pattern'
    )
  splits.check_half(path, split)
  return Files(os.path.dirname(path), tuple(paths), False)


def has_splits(path: str) -> bool:
  """Whether a set is divided into splits."""
  is_folder = os.path.isdir(path)
  return is_folder and not os.path.exists(os.path.join(path, _STATE))


def _saved(folder):
  """The Arrow files of a folder, as its state lists them."""
  state = files.read_json_object(os.path.join(folder, _STATE))
  try:
    names = [entry['filename'] for entry in state['_data_files']]
    paths = tuple(os.path.join(folder, name) for name in names)
  except (KeyError, TypeError):
    paths = ()
  if not paths:
    raise config_lib.ConfigError(
      f'{os.path.join(folder, _STATE)} lists no files, which save_to_disk '
      'writes there; save the set again'
    )
  return Files(folder, paths, False)


def _parquet_files(folder):
  """{split: paths}, of the names of files or of their folders."""
  paths = sorted(glob.glob(os.path.join(glob.escape(folder), '**', f'*{_PARQUET}'), recursive=True))
  by_split = {}
  for path in paths:
    name = _NAME.fullmatch(os.path.basename(path))[1]
    if not re.search('[A-Za-z]', name):  # train/0000.parquet
      name = os.path.basename(os.path.dirname(path))
    by_split.setdefault(name, []).append(path)
  for name, group in by_split.items():
    folders = sorted({os.path.dirname(path) for path in group})
    if len(folders) > 1:
      raise config_lib.ConfigError(
        f'{folder} has the split {name!r} in {folders[0]} and {folders[1]}; '
        'expected the path of one of these'
      )
  if not by_split:
    raise config_lib.ConfigError(
      f'{folder} has neither {_STATE} or {_SPLITS}, which save_to_disk writes, nor Parquet files'
    )
  return by_split
