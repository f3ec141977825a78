"""What the tests of preparation share: the command, and what it leaves."""

import hashlib
import json
import os
import pathlib
import re

from PIL import Image
import pytest
import tensorflow_datasets as tfds

from anp_jax.data.prepare import __main__ as prepare, worker_pool
from tests import builders, launching


def photo(seed: int, kind: str = 'JPEG', **options) -> bytes:
  """Returns an image file of 12 x 10 pixels, another one for each seed."""
  pixels = builders.random_pixels(12, 10, seed)
  return builders.encode_image(pixels, kind, **options)


def files_of_every_kind() -> dict[str, bytes]:
  """Returns a tree with a file of every kind, by path."""
  blank = Image.new('RGB', (500, 374), (240, 240, 240))
  alpha = Image.fromarray(builders.random_pixels(12, 10, 7)).convert('RGBA')
  alpha.putalpha(100)
  return {
    'train/big_cat/0.jpg': photo(0),
    'train/big_cat/alpha.png': builders.encode_image(alpha),
    'train/big_cat/cmyk.jpg': builders.encode_image(
      Image.fromarray(builders.random_pixels(12, 10, 1)).convert('CMYK'), 'JPEG'
    ),
    'train/big_cat/corrupt.jpg': b'<html>',
    'train/big_cat/empty.jpg': b'',
    'train/big_cat/leak.jpg': photo(100),
    'train/big_cat/rotated.jpg': photo(2, exif=builders.exif(6)),
    'train/old_dog/again.jpg': photo(0),
    'train/old_dog/gone.jpg': builders.encode_image(blank),
    'train/old_dog/grey.jpg': builders.encode_image(
      Image.fromarray(builders.random_pixels(12, 10, 3)).convert('L'), 'JPEG'
    ),
    'train/old_dog/named.png': photo(4),
    'train/old_dog/new.jpg': photo(5, 'WEBP'),
    'train/old_dog/short.jpg': photo(6)[:-20],
    'train/old_dog/tiny.png': builders.encode_image(builders.random_pixels(4, 9)),
    'train/red_car/one.jpg': photo(8),
    'validation/big_cat/v.jpg': photo(100),
    'validation/old_dog/w.jpg': photo(101),
    'validation/old_dog/x.jpg': photo(101),
  }


def run(capsys, *arguments) -> tuple[int, str, str]:
  """Runs the command in this process.

  Its tasks run in this process, since starting workers is most of the time;
  where workers matter, their number is an argument.

  Returns:
    The exit status, standard output, standard error.
  """
  with pytest.MonkeyPatch.context() as patch:
    if not any(str(a).startswith('--workers') for a in arguments):
      patch.setattr(worker_pool, 'run', _run_here)
    status = prepare.main(['prepare', *map(str, arguments)])
  out, err = capsys.readouterr()
  return status, out, err


def flags(root, data_dir, *more) -> list[str]:
  """Returns the flags that make the set `x` of a tree."""
  return [f'--from={root}', '--name=x', f'--data_dir={data_dir}', *more]


def make(capsys, root, data_dir, *more) -> str:
  """Makes the set `x` of a tree; returns what is printed."""
  status, out, err = run(capsys, *flags(root, data_dir, *more))
  assert status == 0, err
  return out


def error(capsys, *arguments, words=()) -> str:
  """Returns the one error line, with these words, of a command that has to fail."""
  status, out, err = run(capsys, *arguments)
  assert (status, out) == (2, '')
  (line,) = [x for x in err.splitlines() if not re.match(r'\w+: [\d,]+/', x)]
  assert line.startswith('error: ')
  for word in words:
    assert word in line, line
  return line


def start(*arguments, **environment) -> launching.Program:
  """Starts the command as a person types it."""
  return launching.start('-m', 'anp_jax.data.prepare', *arguments, **environment)


def finish(process: launching.Program) -> tuple[str, str]:
  """Waits for a command that succeeds; returns its output and its errors."""
  out, err = process.communicate(timeout=60)
  assert process.returncode == 0, err
  return out, err


def folder(data_dir, name: str = 'x') -> pathlib.Path:
  """Returns the folder of a finished set."""
  return pathlib.Path(data_dir) / 'anp_folder' / name / '1.0.0'


def damaged(data_dir) -> dict[tuple[str, str], dict]:
  """Returns {(split, file): line} of a set's damaged.jsonl."""
  lines = (folder(data_dir) / 'damaged.jsonl').read_text().splitlines()
  return {(x['split'], x['file']): x for x in map(json.loads, lines)}


def digests(folder: pathlib.Path) -> dict[str, str]:
  """Returns {file name: SHA-256} of a set."""
  return {
    path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())
  }


def examples(data_dir, split='train', name='x') -> list[tuple[str, bytes, int]]:
  """Returns what tfds reads: file name, bytes and label, in order."""
  data = tfds.data_source(
    f'anp_folder/{name}',
    data_dir=data_dir,
    split=split,
    decoders={'image': tfds.decode.SkipDecoding()},
  )
  return [(os.fsdecode(e['file_name']), bytes(e['image']), int(e['label'])) for e in data]


def names(data_dir, split='train') -> list[str]:
  """Returns the names of the files of a set, in order."""
  return [name for name, _, _ in examples(data_dir, split)]


def _run_here(title, function, tasks, workers, damaged=None):
  """Does what `worker_pool.run` does, without processes."""
  del title, workers, damaged
  worker_pool._positions = [0] * len(tasks)
  return [worker_pool._run(i, function, task) for i, task in enumerate(tasks)]
