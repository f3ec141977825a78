"""Sets of small images in tar shards, Arrow, Parquet and tables, for tests."""

import csv
import io
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq

from tests import builders, prepared


def write_tar(path, members: dict[str, bytes], kind=tarfile.GNU_FORMAT):
  """Writes a tar file with members in this order; returns its path."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with tarfile.open(path, 'w', format=kind) as tar:
    for name, data in members.items():
      info = tarfile.TarInfo(name)
      info.size = len(data)
      tar.addfile(info, io.BytesIO(data))
  return path


def samples(numbers, classes, suffix='cls') -> dict[str, bytes]:
  """Members of samples as WebDataset has them: an image, then its class.

  Args:
    numbers: numbers of the samples; sample i has `prepared.photo(i)`.
    classes: texts; sample i is of class i modulo their number.
    suffix: suffix of the member that holds the class.
  """
  members = {}
  for i in numbers:
    members[f'{i:04}.jpg'] = prepared.photo(i)
    members[f'{i:04}.{suffix}'] = classes[i % len(classes)].encode()
  return members


def hf_set(columns: dict, names=('cat', 'dog'), kinds: dict | None = None):
  """A set of Hugging Face's library.

  Args:
    columns: values by name; those of an image are dicts of bytes and path.
    names: classes of columns of the kind ClassLabel.
    kinds: 'Image' or 'ClassLabel' by column; None: an image, and a label of numbers.
  """
  import datasets

  if kinds is None:
    kinds = {'image': 'Image', 'label': 'ClassLabel'}
  types = {'Image': datasets.Image(), 'ClassLabel': datasets.ClassLabel(names=list(names))}
  result = datasets.Dataset.from_dict(columns)
  features = result.features | {name: types[kind] for name, kind in kinds.items()}
  return result.cast(datasets.Features(features))


def photos(numbers) -> list[dict]:
  """Values of an Image column; image i is `prepared.photo(i)`."""
  return [{'bytes': prepared.photo(i), 'path': f'{i}.jpg'} for i in numbers]


def save_to_disk(folder, parts, shards=2):
  """Saves {split: set}, or a set without splits; returns the folder."""
  import datasets

  if isinstance(parts, dict):
    files = dict.fromkeys(parts, shards)
    datasets.DatasetDict(parts).save_to_disk(folder, num_shards=files)
  else:
    parts.save_to_disk(folder, num_shards=shards)
  return folder


def write_parquet(path, table: pa.Table):
  """Writes a Parquet file of small row groups."""
  path.parent.mkdir(parents=True, exist_ok=True)
  pq.write_table(table, path, row_group_size=2)
  return path


def write(root, kind, labels, split='train', photos=None) -> str:
  """Writes a set whose images are 000.jpg and so on; returns its config.data.source.

  Args:
    root: folder of the set.
    kind: 'list', 'tar', 'hf', or 'folder', for which the path alone is returned.
    labels: classes of the images.
    split: name of the images' split; '' for a set without splits.
    photos: bytes of the images; None: image i is `prepared.photo(i)`.
  """
  photos = photos or [prepared.photo(i) for i in range(len(labels))]
  root.mkdir(parents=True, exist_ok=True)
  name = split or 'set'
  if kind == 'folder':
    files = {f'{split or "."}/{c}/{i:03}.jpg': p for i, (c, p) in enumerate(zip(labels, photos))}
    return str(builders.write_tree(root, files))
  if kind == 'list':
    for i, photo in enumerate(photos):
      (root / f'{i:03}.jpg').write_bytes(photo)
    rows = [('path', 'label', 'split'), *((f'{i:03}.jpg', c, name) for i, c in enumerate(labels))]
    with open(root / 'list.csv', 'w', newline='') as file:
      csv.writer(file).writerows(row if split else row[:2] for row in rows)
    return f'list:{root}/list.csv'
  if kind == 'tar':
    members = {}
    for i, (photo, label) in enumerate(zip(photos, labels)):
      members[f'{i:03}.jpg'] = photo
      members[f'{i:03}.cls'] = label if isinstance(label, bytes) else str(label).encode()
    write_tar(root / f'{name}.tar', members)
    return f'tar:{root}/{{split}}.tar' if split else f'tar:{root}/set.tar'
  table = pa.table({'image': [{'bytes': photo} for photo in photos], 'label': labels})
  write_parquet(root / f'{name}.parquet', table)
  return f'hf:{root}' if split else f'hf:{root}/set.parquet'
