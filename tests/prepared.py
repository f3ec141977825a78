"""What the tests of preparation share: the command, and what it leaves."""

import hashlib
import os
import pathlib
import subprocess
import sys

import tensorflow_datasets as tfds

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def command(*arguments, **environment):
  """The command as a person types it."""
  inherited = {
    k: v for k, v in os.environ.items() if not k.startswith('SLURM_')
  }
  return subprocess.Popen(
    [sys.executable, '-m', 'anp_jax.data.prepare', *map(str, arguments)],
    cwd=_ROOT,
    env=inherited | environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,  # as a terminal gives it a group of its own
  )


def done(process):
  out, err = process.communicate(timeout=60)
  assert process.returncode == 0, err
  return out, err


def folder(data_dir, name):
  return pathlib.Path(data_dir) / 'anp_folder' / name / '1.0.0'


def digests(folder):
  """{file name: SHA-256} of a set."""
  return {
    path.name: hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(folder.iterdir())
  }


def stored(data_dir, name, split):
  """What tfds reads: (file name, bytes, label) of every example, in order."""
  data = tfds.data_source(
    f'anp_folder/{name}',
    data_dir=data_dir,
    split=split,
    decoders={'image': tfds.decode.SkipDecoding()},
  )
  return [
    (os.fsdecode(e['file_name']), bytes(e['image']), int(e['label']))
    for e in data
  ]
