"""Mode evaluate: a checkpoint, and any examples of classes that it knows."""

import contextlib
import dataclasses
import math
import os
import re

from absl import logging
import jax
import numpy as np

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.checkpoint import manager as checkpoint_lib
from anp_jax.checkpoint import run_dir as workdir_lib
from anp_jax.checkpoint.weights import initial
from anp_jax.config import strategy as strategy_lib
from anp_jax.data import sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.data.sources import label_mapping
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel import state as state_lib
from anp_jax.reporting import run_page
from anp_jax.reporting import summary
from anp_jax.reporting.analysis import files
from anp_jax.reporting.analysis import page
from anp_jax.reporting.analysis import results as results_lib
from anp_jax.system import compile_cache
from anp_jax.training import build
from anp_jax.training import eval_loop
from anp_jax.training import objective as objective_lib
from anp_jax.training import run_spec

_SAME_DATA = ('data.source', 'data.path', 'data.lists', 'data.dir')
# What an image is to the network, beside which part of it is seen.
_PIXELS = (
  'data.image_size', 'data.resize', 'data.mean', 'data.std', 'data.decode',
)  # fmt: skip


class NotWritten(cluster.Failed):
  """The files of an evaluation, for which it was made."""


def run(config, workdir: str, which: str, processes, output: str = '') -> dict:
  """Scores a checkpoint and writes what there is to see.

  Args:
    config: of the run; its data may be any others with classes of the run.
    workdir: of the run; where it has no checkpoint, the weights that
      config.init names are scored.
    which: checkpoint: 'newest', 'best' or a step.
    processes: of the evaluation.
    output: folder for what is written; '': WORKDIR/evaluation/STEP-SPLIT.

  Returns:
    The metrics, as `evaluate.run`.

  Raises:
    ConfigError: if there is no checkpoint, or data that do not fit it.
    evaluate.Damaged: if too many examples cannot be read.
  """
  processes.check_shared(workdir)
  compile_cache.enable(config)
  untrained = not workdir_lib.has_checkpoints(workdir)
  if untrained and not config.init['from']:
    raise config_lib.ConfigError(f'{workdir} has no checkpoint to evaluate')
  began = workdir_lib.saved_config(workdir).get('init.from', '')
  if not untrained and config.init['from'] not in ('', began):
    raise config_lib.ConfigError(
      f'config.init.from={config.init["from"]!r} would not be scored: '
      f'{workdir} has checkpoints of its own; choose another --workdir'
    )
  mesh = mesh_lib.create(config, hosts=processes.hosts)
  strategy = strategy_lib.find(config)
  strategy.check_mesh(config, mesh)
  config = workdir_lib.with_batch_size(
    config, workdir, mesh_lib.batch_devices(mesh)
  )
  source = sources.open_source(config, training=False)
  if untrained:
    known = initial.vocabulary(config, source.vocabulary)
  else:
    known = workdir_lib.labels(workdir)
  source = label_mapping.map_labels(source, known)
  objective = objective_lib.create(known, config)
  # Of a run that nothing is trained of, no schedule matters.
  still = config.copy_and_resolve_references()
  still.schedule.warmup = '0 steps'
  spec = run_spec.RunSpec(still, mesh, objective, config.batch_size, 1)
  job = strategy_lib.Job(config, workdir, processes, 'evaluate', which, output)
  calibrated_config, _ = strategy.calibrate(spec, job, training=False)
  parts = build.create(dataclasses.replace(spec, config=calibrated_config))
  if untrained:
    weights, lines = initial.load(
      config, parts, known, gather=processes.gather, exact=True
    )
    state = state_lib.create(parts.init_fn, parts.abstract_state, weights)
    step = 0
    if jax.process_index() == 0:
      print('\n'.join([*lines, _network_line(config)]))
  else:
    checkpoints = checkpoint_lib.Checkpoints(
      workdir, config, None, parts.abstract_state, processes.gather
    )
    restored = checkpoints.restore(which)
    checkpoints.close()
    if restored is None:
      raise config_lib.ConfigError(f'{workdir} has no checkpoint to evaluate')
    state, step = restored
  folder = os.path.expanduser(output) or os.path.join(
    workdir, page.FOLDER, _name(config, workdir, step)
  )
  problem = processes.gather(_make(folder))[0]
  if problem:
    raise config_lib.ConfigError(problem)
  for line in _other_pixels(config, workdir):
    if jax.process_index() == 0:
      print(line)
  stream = stream_lib.Stream(config, mesh_lib.batch_sharding(mesh))
  batches = processes.heartbeat_each(
    stream.evaluation(source), 'evaluating', step
  )
  scores, rows = _evaluated(
    config, workdir, parts, parts.eval_state_fn(state), batches, source
  )
  if jax.process_index() == 0:
    processes.heartbeat('writing', step)
    results = _results(config, workdir, source, rows)
    origin = config.init['from'] if untrained else ''
    summary.print_scores(step, scores | results.scores(), origin)
    try:
      _write(folder, config, source, results, scores, step, origin)
      print(f'evaluation: {os.path.join(folder, page.PAGE)}')
      if run_page.again(workdir, folder):
        print(f'report: {run_page.path(workdir)}')
    except OSError as e:
      raise NotWritten(f'{e.filename or folder}: {e.strerror or e}') from e
  return scores


def of_training(
  config, workdir: str, parts, scored, batches, source, step: int
) -> dict:
  """The evaluation with which a training ends; process 0 writes its folder.

  Args:
    config: of the run.
    workdir: of the run.
    parts: `assembly.Assembly` of the run.
    scored: TrainState that is scored.
    batches: device batches of the whole split, in order.
    source: of these.
    step: of the state.

  Returns:
    The metrics, as `evaluate.run`.

  Raises:
    evaluate.Damaged: if too many examples cannot be read.
  """
  scores, rows = _evaluated(config, workdir, parts, scored, batches, source)
  if jax.process_index() == 0:
    name = f'{step}-{_split(config)}'
    folder = os.path.join(workdir, page.FOLDER, name)
    with _written(folder):
      results = _results(config, workdir, source, rows)
      _write(folder, config, source, results, scores, step)
  return scores


def _evaluated(config, workdir, parts, scored, batches, source):
  """Scores and rows; raises where too many examples are lost."""
  held_out = _held_out(config, workdir, source.vocabulary)
  scores, rows = eval_loop.examples(
    parts.examples_step(held_out=held_out), scored, batches, len(source)
  )
  eval_loop.check_damage(config, source, scores)
  return scores, rows


@contextlib.contextmanager
def _written(folder):
  """What goes wrong costs the files, and not what was trained."""
  try:
    yield
  except Exception as e:  # noqa: BLE001 - of a disk, or of what draws
    logging.error('%s is not written: %s: %s', folder, type(e).__name__, e)


def _make(folder):
  """Makes it, on process 0; why it cannot be, '' if it can."""
  if jax.process_index():
    return ''
  try:
    os.makedirs(folder, exist_ok=True)
  except OSError as e:
    return f'{folder} cannot be made: {e.strerror}'
  if not os.access(folder, os.W_OK):
    return f'{folder} cannot be written to'
  return ''


def _other_pixels(config, workdir):
  """A line for each key by which images are not those of training."""
  saved, have = workdir_lib.saved_config(workdir), config_lib.flat(config)
  for key in _PIXELS:
    was = saved.get(key, have[key])
    if list(np.ravel(was)) != list(np.ravel(have[key])):
      yield f'config.{key} is {have[key]!r}, and was {was!r} in training'


def _network_line(config):
  d, m = config.data, config.model
  return (
    f'model    {m.name}; images of {d.image_size} pixels out of {d.resize}, '
    f'{d.decode}, mean {tuple(d.mean)}, std {tuple(d.std)}'
  )


def _results(config, workdir, source, rows):
  known = source.vocabulary
  return results_lib.Results(
    known, rows, workdir_lib.class_sizes(workdir, len(known)),
    _held_out(config, workdir, known),
  )  # fmt: skip


def _write(folder, config, source, results, scores, step, origin=''):
  """The folder of an evaluation; origin: of weights that nothing trained."""
  files.write(folder, config, source, results, {
    'step': step,
    'weights': origin,
    'data': source.name,
    'damaged': len(source) - scores['examples'],
    'scores': {
      name: value if math.isfinite(value) else None
      for name, value in (scores | results.scores()).items()
    },
  })  # fmt: skip


def _held_out(config, workdir, known):
  """Classes that the run had no training examples of."""
  saved = workdir_lib.saved_config(workdir)
  names = set(saved.get('data.held_out', config.data.held_out))
  return tuple(i for i, name in enumerate(known.names) if name in names)


def _name(config, workdir, step):
  """STEP-SPLIT; for other data than the run's, also whose."""
  saved, have = workdir_lib.saved_config(workdir), config_lib.flat(config)
  name = f'{step}-{_split(config)}'
  if all(saved.get(key, have[key]) == have[key] for key in _SAME_DATA):
    return name
  path = os.path.abspath(os.path.expanduser(config.data.path))
  own = os.path.basename(path) if config.data.path else config.data.source
  return f'{name}-of-{_slug(own)}'


def _split(config):
  # A split file by its name; '.' is all of a folder.
  name = os.path.basename(config.data.eval_split.removesuffix('.txt'))
  return _slug(name) or 'all'


def _slug(text):
  return re.sub(r'[^\w-]+', '-', text).strip('-')
