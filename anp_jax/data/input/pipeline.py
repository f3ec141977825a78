"""Host batches: the rows a process owns of the global batch of each step."""

from collections.abc import Generator
from concurrent import futures
import contextlib

import numpy as np

from anp_jax.data import sources
from anp_jax.data.input import (
  batch_plan,
  batch_reader,
  corruption,
  decode_pillow,
  decode_tensorflow,
)
from anp_jax.data.sources import source as source_lib
from anp_jax.system import cores


def batches(
  source: sources.Source, plan: batch_plan.BatchPlan, registry: corruption.Registry | None = None
) -> Generator[dict, None, None]:
  """The batches of a process, from plan.start on.

  Args:
    source: any source but a synthetic one.
    plan: examples of each batch, and their cuts.
    registry: damaged examples of the source, shared by its streams.

  Yields:
    image (n, size, size, 3) uint8, of vectors (n, 1, 1, width) float32; label (n,)
    int32, weight (n,) float32 and row (n,) int32, the row of the global batch. A
    damaged example's row shows another example, with weight 0.
  """
  registry = registry or corruption.Registry(source)
  threads = plan.config.data.threads or cores.count()
  with futures.ThreadPoolExecutor(threads) as pool:
    reader = batch_reader.BatchReader(source, plan, registry, pool, threads)
    if source.kind == 'vectors':
      decoded = _vectors(reader)
    elif source.kind == 'encoded' and plan.config.data.decode == 'exact':
      decoded = decode_tensorflow.batches(reader)
    else:
      decoded = decode_pillow.batches(reader)
    for count, (image, label, weight) in enumerate(decoded, plan.start):
      if source.kind != 'vectors':
        image = plan.moved(count, image)
      rows = plan.step_and_rows(count)[1].astype(np.int32)
      yield {'image': image, 'label': label, 'weight': weight, 'row': rows}


def labelled(
  source: sources.Source, plan: batch_plan.BatchPlan, registry: corruption.Registry | None = None
) -> Generator[dict, None, None]:
  """The batches of `batches`, for what needs the class of each example.

  Raises:
    ConfigError: at an example that has none.
  """
  with contextlib.closing(batches(source, plan, registry)) as stream:
    for count, batch in enumerate(stream, plan.start):
      source_lib.check_labelled(source, batch['label'], plan.indices(count)[1])
      yield batch


def _vectors(reader):
  """The batches of a source in memory, whose examples are neither cut nor damaged."""
  for count in reader.counts():
    _, vectors, labels, weights = reader.read(count)
    yield np.stack(vectors), labels, weights
