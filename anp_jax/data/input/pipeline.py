"""Host batches: the rows a process owns of the global batch of each step."""

from collections.abc import Generator
from concurrent import futures
import contextlib

import numpy as np

from anp_jax.data import sources
from anp_jax.data.input import (
  batch_reader,
  batch_sampler,
  corruption,
  decode_pillow,
  decode_tensorflow,
)
from anp_jax.data.sources import source as source_lib
from anp_jax.system import cores


def batches(
  source: sources.Source,
  sampler: batch_sampler.BatchSampler,
  registry: corruption.Registry | None = None,
) -> Generator[dict, None, None]:
  """The batches of a process, from sampler.start on.

  Args:
    source: any source but a synthetic one.
    sampler: examples of each batch, and their cuts.
    registry: damaged examples of the source, shared by its streams.

  Yields:
    image (n, size, size, 3) uint8, of vectors (n, 1, 1, width) float32; label (n,)
    int32, weight (n,) float32 and row (n,) int32, the row of the global batch. A
    damaged example's row shows another example, with weight 0.
  """
  registry = registry or corruption.Registry(source)
  threads = sampler.config.data.threads or cores.count()
  with futures.ThreadPoolExecutor(threads) as pool:
    reader = batch_reader.BatchReader(source, sampler, registry, pool, threads)
    if source.kind == 'vectors':
      decoded = _vectors(reader)
    elif source.kind == 'encoded' and sampler.config.data.decode == 'exact':
      decoded = decode_tensorflow.batches(reader)
    else:
      decoded = decode_pillow.batches(reader)
    for batch_index, (image, label, weight) in enumerate(decoded, sampler.start):
      if source.kind != 'vectors':
        image = sampler.moved(batch_index, image)
      rows = sampler.step_and_rows(batch_index)[1].astype(np.int32)
      yield {'image': image, 'label': label, 'weight': weight, 'row': rows}


def labelled(
  source: sources.Source,
  sampler: batch_sampler.BatchSampler,
  registry: corruption.Registry | None = None,
) -> Generator[dict, None, None]:
  """The batches of `batches`, for what needs the class of each example.

  Raises:
    ConfigError: at an example that has none.
  """
  with contextlib.closing(batches(source, sampler, registry)) as stream:
    for batch_index, batch in enumerate(stream, sampler.start):
      source_lib.check_labelled(source, batch['label'], sampler.indices(batch_index)[1])
      yield batch


def _vectors(reader):
  """The batches of a source in memory, whose examples are neither cut nor damaged."""
  for batch_index in reader.batch_indices():
    _, vectors, labels, weights = reader.read(batch_index)
    yield np.stack(vectors), labels, weights
