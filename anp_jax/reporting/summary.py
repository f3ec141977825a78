"""Summaries of a run, at its start and at its end."""

import collections
from collections.abc import Callable
import functools
import os
import platform
import sys
import time

from absl import logging
import jax
import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.checkpoint import manager
from anp_jax.cluster import process_info
from anp_jax.config import strategy as strategy_lib, urls
from anp_jax.data import sources, vocabulary as vocabulary_lib
from anp_jax.data.sources import scenes
from anp_jax.parallel import state as state_lib
from anp_jax.reporting import (
  event_file,
  run_page,
  step_rates,
  telemetry as telemetry_lib,
  weights_and_biases,
)
from anp_jax.reporting.analysis import analysis_page as evaluation_page
from anp_jax.reporting.run_page import run_tables
from anp_jax.system import (
  cores as cores_lib,
  device_peaks,
  drawing,
  emulation,
  markdown,
  onednn,
  progress,
)
from anp_jax.training import build, metric_labels, schedule_change

_NAMED, _LETTERS = 5, 40  # classes in a line, letters of each


def telemetry(
  config: ml_collections.ConfigDict,
  workdir: str,
  mesh: jax.sharding.Mesh,
  length: step_rates.RunLength,
  clock: Callable[[], float] = time.monotonic,
) -> telemetry_lib.Telemetry:
  """Returns the telemetry of a run, which the primary process writes.

  Args:
    config: config of the run.
    workdir: folder of the run.
    mesh: mesh of the run.
    length: length of the run.
    clock: function that returns seconds, which never run backwards.
  """
  is_primary = jax.process_index() == 0
  device = mesh.devices.flat[0]
  peak = device_peaks.peak_flops(device.device_kind, config.model.dtype)
  writers: list[Callable[[], telemetry_lib.Writer]] = []
  if config.log.wandb:
    writers.append(functools.partial(weights_and_biases.Writer, workdir, config))
  if config.log.tensorboard:
    folder = os.path.join(workdir, telemetry_lib.TENSORBOARD)
    writers.append(functools.partial(event_file.EventFile, folder, length.start_step))
  line = progress.LiveLine(sys.stdout, clock)
  return telemetry_lib.Telemetry(workdir, length, peak * mesh.size, writers, is_primary, line)


def log_run_info(
  telemetry: telemetry_lib.Telemetry,
  config: ml_collections.ConfigDict,
  mesh: jax.sharding.Mesh,
  abstract_state: state_lib.TrainState,
  splits: tuple[sources.Source, sources.Source],
  class_sizes: np.ndarray | None = None,
) -> None:
  """Prints network, data and devices of a run, and records them.

  Args:
    telemetry: telemetry of the run.
    config: config of the run.
    mesh: mesh of the run.
    abstract_state: state of one device, or its shapes.
    splits: sources of the training and of the validation examples.
    class_sizes: (classes,) training images of each class; None: not counted.
  """
  train, validation = splits
  vocabulary = train.vocabulary
  classes = vocabulary.text()
  devices = f'{mesh.size} x {mesh.devices.flat[0].device_kind}'
  # The cores of this process feed its devices.
  cores = vocabulary_lib.counted(cores_lib.count(), 'core')
  size = f'{_count(abstract_state.params) / 1e6:.2f} M parameters'
  head, balance = config.model.head, config.data.balance
  head = '' if head == 'joint' else f', head {head}'
  if balance != 'none':
    classes += f', balanced by {balance}'
  for text in (
    f'model    {config.model.name}, {size}, {config.model.dtype}{head}',
    f'data     {config.data.source}: {len(train):,} training and '
    f'{len(validation):,} validation images, {classes}',
    f'strategy {config.strategy.name}',
    f'devices  {devices}, {config.batch_size} images a step, {cores}',
    *_computing(config, mesh),
    f'scores   {_scored_weights(config)}',
    *cautions(config, train, config.batch_size, len(train), class_sizes),
  ):
    telemetry.log(text)
  telemetry.start(
    {
      'data': ' '.join(
        filter(None, (config.data.source, urls.remote_url(config.data.get('path', ''))))
      ),
      'training_images': len(train),
      'validation_images': len(validation),
      'classes': vocabulary.text(),
    }
  )


def log_changes(
  telemetry: telemetry_lib.Telemetry, checkpoints: manager.Checkpoints, program: build.ModelAndSteps
) -> None:
  """Records what differs since the restored checkpoint was saved.

  Args:
    telemetry: telemetry of the run.
    checkpoints: checkpoints of the run, which may have been restored.
    program: model and steps of the run.
  """
  values, spec, step = checkpoints.changes(), program.spec, telemetry.start_step
  rates = schedule_change.rates(checkpoints.saved_config, spec, step)
  if rates:
    before = config_lib.from_flat(checkpoints.saved_config).duration
    values = {'duration': (before, spec.config.duration), **values}
  telemetry.changes(values, rates)


def _computing(config, mesh):
  """Returns the line about the library or emulation that computes, if there is one."""
  if config.emulate.enabled:
    return [f'emulated {emulation.describe(config.emulate)}']
  platform_name = mesh.devices.flat[0].platform
  m = config.model
  # oneDNN has no float64.
  if platform_name != 'cpu' or m.cpu_library == 'xla' or m.dtype == 'float64':
    return []
  library = onednn.find()
  if library:
    return [f'library  {library.describe()}']
  reason = onednn.missing_reason()
  return [f'library  XLA alone: {reason}'] if reason else []


def cautions(
  config: ml_collections.ConfigDict,
  train: sources.Source,
  batch_size: int,
  examples: int,
  class_sizes: np.ndarray | None = None,
) -> list[str]:
  """Returns lines about training data that are hardly meant as they are.

  Args:
    config: config of the run.
    train: source of the training examples.
    batch_size: images per step.
    examples: images that a step draws from.
    class_sizes: (classes,) training images of each class; None: not counted.
  """
  lines = []
  if batch_size > examples:
    lines.append(
      f'a batch of {batch_size} images is drawn from {examples}: images repeat '
      f'within it; expected config.batch_size of at most {examples}'
    )
  side = config.data.image_size
  if config.data.source == 'anp_shapes' and side > scenes.IMAGE_SIZE:
    lines.append(
      f'the embedded drawings of {scenes.IMAGE_SIZE} px are enlarged to '
      f'{side}: that only tries a recipe out; expected photographs, '
      '--config.data.source=folder --config.data.path=DIR'
    )
  names = train.vocabulary.names
  if len(names) == 1:
    name = drawing.shortened(names[0], _LETTERS)
    lines.append(f'the data have one class only, {name}: there is nothing to tell it from')
  empty = [
    drawing.shortened(name, _LETTERS)
    for name, size in zip(names, () if class_sizes is None else class_sizes)
    if not size and name not in config.data.held_out
  ]
  if empty:
    more = len(empty) - _NAMED
    lines.append(
      f'without a training image: {len(empty)} of {len(names)} classes, '
      f'{", ".join(empty[:_NAMED])}' + (f' and {more} more' if more > 0 else '')
    )
  return [f'caution  {line}' for line in lines]


def is_scored(workdir: str, step: int) -> bool:
  """Returns whether this step's evaluation is in metrics.jsonl."""
  return any(r['step'] == step for r in telemetry_lib.of_kind(workdir, 'validation'))


def last_scores(workdir: str) -> dict:
  """Returns the last evaluation in metrics.jsonl; {} if there is none."""
  return next(reversed(telemetry_lib.of_kind(workdir, 'validation')), {})


def print_scores(step: int, scores: dict, weights: str = '') -> None:
  """Prints the scores of a checkpoint, or of weights, on one process."""
  if jax.process_index() == 0:
    what = f'weights of {weights}' if weights else f'checkpoint of step {step}'
    print(f'{what}, {vocabulary_lib.counted(scores["examples"], "image")}')
    names = metric_labels.names(scores)
    rows = [
      (f'  {names[name]}', evaluation_page.score(name, scores[name]))
      for name in (*metric_labels.LABELS, *evaluation_page.LABELS)
      if name in scores
    ]
    print(markdown.plain(rows))


def report(
  config: ml_collections.ConfigDict,
  workdir: str,
  mesh: jax.sharding.Mesh,
  abstract_state: state_lib.TrainState,
  has_page: bool = True,
) -> None:
  """Writes the run's result and its page, and prints its tables.

  Args:
    config: config of the run.
    workdir: folder of the run.
    mesh: mesh of the run.
    abstract_state: state of one network.
    has_page: whether the page is written.
  """
  parameters, kind = _count(abstract_state.params), mesh.devices.flat[0].device_kind
  facts = {
    'network': config.model.name,
    'strategy': config.strategy.name,
    'parameters': f'{parameters:,}',
    'devices': f'{mesh.size} x {kind}',
    'scores': _scored_weights(config),
  }
  try:
    # Before the page, without which a run that ends again reports again.
    result = run_tables.result(*run_tables.load(workdir))
    computed_by = {'parameters': parameters, 'devices': mesh.size, 'device': kind}
    telemetry_lib.write_result(workdir, result | computed_by)
    if has_page:
      print(run_page.write(workdir, config_lib.to_text(config), facts, hardware(mesh)))
      print(urls.remote_url(f'report: {run_page.path(workdir)}'))
  except Exception as e:  # noqa: BLE001 - what was trained is saved and scored
    where = urls.remote_url(workdir)
    logging.error('%s: no report: %s: %s', where, type(e).__name__, e)


def hardware(mesh: jax.sharding.Mesh) -> dict[str, object]:
  """Returns the hardware and the versions of a run, name to value."""
  kinds = collections.Counter(d.device_kind for d in mesh.devices.flat)
  return {
    'devices': ', '.join(f'{n} x {kind}' for kind, n in kinds.items()),
    'processes': jax.process_count(),
    'host': f'{platform.node()}, {platform.platform()}',
    'cores': f'{cores_lib.count()} of {platform.machine()}',
    **{name: version for name, version in process_info.versions().items() if version},
    'Python': platform.python_version(),
  }


def _count(params) -> int:
  return sum(int(np.prod(p.shape)) for p in jax.tree.leaves(params))


def _scored_weights(config):
  if config.ema:
    text = f'of weights and batch statistics averaged with decay {config.ema:g}'
  else:
    text = 'of the current weights and running batch statistics'
  return text + strategy_lib.find(config).describe_scores(config)
