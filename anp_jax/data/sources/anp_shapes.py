"""The embedded data set `anp_shapes`: rendered adjective-noun pairs as JPEGs.

It is a TensorFlow Datasets builder like any other, but needs no download: the
scenes are drawn by `scenes` on first use, in a few seconds, and stored as
ArrayRecord files. Neither that nor reading them imports TensorFlow.
"""

import concurrent.futures
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

from absl import logging
import numpy as np
import tensorflow_datasets as tfds

from anp_jax.data.sources import scenes
from anp_jax.system import cores, files

EXAMPLES_PER_CLASS = {'train': 160, 'validation': 30}

_DESCRIPTION = """\
Scenes of one object with one property on a cluttered background, labelled with
an adjective-noun pair such as `striped_star`; drawn by a program."""

_SPLIT_NUMBERS = {'train': 0, 'validation': 1}
_JOBS_PER_WORKER = 256  # fewer are not worth the start of a process


class AnpShapes(tfds.core.GeneratorBasedBuilder):
  """Builder of `anp_shapes`; use `prepare` rather than this class.

  Features: `image`, a JPEG of `scenes.IMAGE_SIZE` pixels a side, uint8 RGB;
  `label`, int64, an index into `scenes.CLASS_NAMES`.
  """

  VERSION = tfds.core.Version('1.0.0')
  RELEASE_NOTES = {'1.0.0': 'First version.'}
  # Nothing is downloaded. Without this, tfds 4.9 looks for checksums and needs
  # `importlib_resources`, which it does not require, to do so.
  url_infos = None

  def _info(self) -> tfds.core.DatasetInfo:
    # Not `dataset_info_from_configs`: it looks for metadata files around this
    # one, and fails where the code lives in an archive.
    side = scenes.IMAGE_SIZE
    return tfds.core.DatasetInfo(
      builder=self,
      description=_DESCRIPTION,
      features=tfds.features.FeaturesDict(
        {
          'image': tfds.features.Image(shape=(side, side, 3), encoding_format='jpeg'),
          'label': tfds.features.ClassLabel(names=scenes.CLASS_NAMES),
        }
      ),
      supervised_keys=('image', 'label'),
    )

  def _split_generators(self, dl_manager):
    del dl_manager
    return {split: self._generate_examples(split) for split in _SPLIT_NUMBERS}

  def _generate_examples(self, split):
    jobs = [
      (class_id, scene_seed(split, index))
      for class_id in range(len(scenes.CLASS_NAMES))
      for index in range(EXAMPLES_PER_CLASS[split])
    ]
    for (class_id, seed), data in zip(jobs, _render(jobs)):
      # Bytes are stored as they are; an array would be encoded once more.
      key = f'{scenes.CLASS_NAMES[class_id]}_{seed}'
      yield key, {'image': data, 'label': class_id}

  # These two would print lines about a download.
  def _log_download_bytes(self):
    pass

  def _log_download_done(self):
    pass


def prepare(data_dir: str) -> tfds.core.DatasetBuilder:
  """Returns the builder of the finished set, which is made if it is missing.

  The set is made in a directory of its own and then renamed, so that a killed
  build leaves nothing that looks finished. Processes of one host wait for each
  other; of several hosts each makes the set, and the first rename wins.

  Args:
    data_dir: a directory of data sets on a file system; made if missing.

  Returns:
    A builder to read with, for instance by `as_data_source`.

  Raises:
    FileExistsError: if something else is in the set's place.
  """
  data_dir = os.path.abspath(os.path.expanduser(data_dir))
  final_dir = os.path.join(data_dir, AnpShapes.name, str(AnpShapes.VERSION))
  if not _is_finished(final_dir):
    os.makedirs(data_dir, exist_ok=True)
    lock = os.path.join(data_dir, f'.{AnpShapes.name}.lock')
    with files.lock(lock) as locked:
      if locked:
        _remove_leftovers(data_dir)
      if not _is_finished(final_dir):
        _build(data_dir, final_dir)
  return tfds.builder_from_directory(final_dir)


def scene_seed(split: str, index: int) -> int:
  """The seed of a class's `index`-th scene; no two splits share one."""
  if not 0 <= index < 2**32:
    raise ValueError(f'Scene index {index} is outside of 0..2**32.')
  return (_SPLIT_NUMBERS[split] << 32) + index


def _is_finished(final_dir):
  # The directory appears at once with all its files; they are named here only
  # to recognise a copy made by hand that was interrupted.
  return all(
    os.path.isfile(os.path.join(final_dir, name)) for name in ('dataset_info.json', 'features.json')
  )


def _build(data_dir, final_dir):
  """Makes the set in a folder of its own and moves it to its place."""
  count = len(scenes.CLASS_NAMES) * sum(EXAMPLES_PER_CLASS.values())
  logging.info('Drawing %s scenes for %s, once.', f'{count:,}', final_dir)
  start = time.monotonic()
  tfds.disable_progress_bar()
  own_dir = tempfile.mkdtemp(prefix=_own_prefix(), dir=data_dir)
  try:
    builder = AnpShapes(data_dir=own_dir, file_format='array_record')
    builder.download_and_prepare(
      download_config=tfds.download.DownloadConfig(try_download_gcs=False)
    )
    os.makedirs(os.path.dirname(final_dir), exist_ok=True)
    try:
      os.rename(builder.data_path, final_dir)
    except OSError as error:
      if not _is_finished(final_dir):  # else another host was faster
        raise FileExistsError(
          f'{final_dir} is not a finished {AnpShapes.name}, move it away.'
        ) from error
  finally:
    shutil.rmtree(own_dir, ignore_errors=True)
  logging.info('Data set is ready after %.1f s.', time.monotonic() - start)


def _own_prefix():
  # The host is part of the name, because the lock may not reach other hosts:
  # what one of them is writing must not be taken for a leftover.
  return f'.{AnpShapes.name}.{socket.gethostname()}.'


def _remove_leftovers(data_dir):
  """Removes what killed builds left; only while holding the lock."""
  for name in os.listdir(data_dir):
    path = os.path.join(data_dir, name)
    if name.startswith(_own_prefix()) and os.path.isdir(path):
      shutil.rmtree(path, ignore_errors=True)


def _render(jobs):
  """Renders (class_id, seed) pairs with all available CPUs.

  Args:
    jobs: list of (class_id, seed).

  Returns:
    The JPEG files in the order of the jobs: list of bytes.
  """
  # Plain programs instead of `multiprocessing`: its spawned workers would first
  # import the parent's `__main__` with all the libraries that it uses (and fail
  # where it came from standard input), and outlive a killed parent.
  # `-P`: modules in the script's folder must not hide the standard library's.
  command = [sys.executable, '-P', scenes.__file__]
  one_thread = {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}
  pairs = np.array(jobs, '<i8')
  workers = min(cores.count(), -(-len(jobs) // _JOBS_PER_WORKER))

  def run(worker):
    return subprocess.run(
      command,
      input=pairs[worker::workers].tobytes(),
      stdout=subprocess.PIPE,
      env=os.environ | one_thread,
      check=True,
    ).stdout

  images = [b''] * len(jobs)
  try:
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
      for worker, output in enumerate(pool.map(run, range(workers))):
        images[worker::workers] = _split_records(output)
  except (OSError, subprocess.CalledProcessError) as error:
    logging.warning('Drawing in this process, which is slower: %s', error)
    images = [scenes.render(*job) for job in jobs]
  return images


def _split_records(output):
  """Undoes the framing of `scenes.main`."""
  records = []
  position = 0
  while position < len(output):
    start = position + 4
    position = start + int.from_bytes(output[position:start], 'little')
    records.append(output[start:position])
  return records
