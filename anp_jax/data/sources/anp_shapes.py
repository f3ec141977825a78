"""The embedded data set `anp_shapes`: rendered adjective-noun pairs as JPEGs.

It needs no download: the scenes are drawn by `scenes` on first use, in a few
seconds, and stored in an Arrow file for each split.
"""

import concurrent.futures
import os
import pickle
import subprocess
import sys
import time

from absl import logging
import numpy as np
import pyarrow as pa

from anp_jax.data import index_shuffle, vocabulary as vocabulary_lib
from anp_jax.data.sources import (
  arrow_rows,
  image_folder,
  listings,
  scenes,
  source as source_lib,
  splits,
  table_cache,
)
from anp_jax.system import cores, files

EXAMPLES_PER_CLASS = {'train': 160, 'validation': 30}

_KIND = 'anp_shapes-1'  # with the version of the set
_SPLIT_NUMBERS = {'train': 0, 'validation': 1}
_JOBS_PER_WORKER = 256  # fewer are not worth the start of a process


def open_split(split: str, data_dir: str) -> source_lib.Source:
  """A split of the set, which is drawn if it is not stored.

  Args:
    split: 'train' or 'validation', or another name of these.
    data_dir: data folder; made if missing.

  Raises:
    ConfigError: for another split, or if the folder cannot be written to.
  """
  split = splits.choose('anp_shapes', split, EXAMPLES_PER_CLASS)
  jobs = [
    (class_id, scene_seed(split, index))
    for class_id in range(len(scenes.CLASS_NAMES))
    for index in range(EXAMPLES_PER_CLASS[split])
  ]
  # A part of the split has some of each class.
  order = index_shuffle.shuffled(np.arange(len(jobs)), _SPLIT_NUMBERS[split], len(jobs))
  jobs = [jobs[i] for i in order]

  def build(path):
    logging.info('Drawing %s scenes, once.', f'{len(jobs):,}')
    start = time.monotonic()
    table = pa.table({'image': _render(jobs)})
    with pa.OSFile(path, 'wb') as file, pa.ipc.new_file(file, table.schema) as out:
      out.write_table(table)
    logging.info('Drawn in %.1f s.', time.monotonic() - start)

  path = table_cache.ensure(data_dir, f'{_KIND}-{split}', (), build)
  listing = image_folder.Listing(
    root=path,
    files=tuple(f'{scenes.CLASS_NAMES[class_id]}_{seed}' for class_id, seed in jobs),
    labels=np.array([class_id for class_id, _ in jobs], np.int32),
    vocabulary=vocabulary_lib.Vocabulary(scenes.CLASS_NAMES),
    name=f'anp_shapes: {split}',
    storage=arrow_rows.ArrowRows((path,), (files.state(path),), '', 'image', np.arange(len(jobs))),
  )
  return listings.StoredImages(listing)


def scene_seed(split: str, index: int) -> int:
  """The seed of a class's `index`-th scene; no two splits share one."""
  return (_SPLIT_NUMBERS[split] << 32) + index


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
        images[worker::workers] = pickle.loads(output)
  except (OSError, subprocess.CalledProcessError) as error:
    logging.warning('Drawing in this process, which is slower: %s', error)
    images = [scenes.render(*job) for job in jobs]
  return images
