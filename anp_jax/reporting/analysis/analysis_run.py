"""Mode evaluate: a checkpoint, and any examples of classes that it knows."""

import dataclasses
import math
import os
import re
from typing import Any

from absl import logging
import jax
import numpy as np

from anp_jax import cluster, config as config_lib
from anp_jax.checkpoint import manager, run_dir
from anp_jax.checkpoint.weights import initial
from anp_jax.config import strategy as strategy_lib, urls
from anp_jax.data import sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.data.sources import agreement, label_mapping
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from anp_jax.reporting import run_page, summary
from anp_jax.reporting.analysis import (
  analysis_files,
  analysis_page,
  analysis_results as results_lib,
)
from anp_jax.system import compile_cache
from anp_jax.training import build, eval_loop, objective as objective_lib, run_spec

_SAME_DATA = ('data.source', 'data.path', 'data.lists', 'data.dir')
# What an image is to the network, whichever part of it is seen.
_PIXELS = ('data.image_size', 'data.resize', 'data.mean', 'data.std', 'data.decode')


class ReportError(cluster.RunFailedError):
  """The files of an evaluation, for which it was made."""


@dataclasses.dataclass(frozen=True)
class Subject:
  """A state that is evaluated, and the examples that it is evaluated on.

  Attributes:
    config: of the run.
    workdir: of the run.
    program: `build.Program` of the run.
    source: of the examples.
    step: of the state.
    weights: where the weights are from, if nothing trained them; else ''.
  """

  config: Any
  workdir: str
  program: build.Program
  source: Any
  step: int
  weights: str = ''


def run(config, workdir: str, checkpoint: str, processes, output: str = '') -> dict:
  """Scores a checkpoint and writes what there is to see.

  Args:
    config: of the run; its data may be any others with classes of the run.
    workdir: of the run; where it has no checkpoint, the weights that
      config.init names are scored.
    checkpoint: 'newest', 'best' or a step.
    processes: of the evaluation.
    output: folder for what is written; '': WORKDIR/evaluation/STEP-SPLIT.

  Returns:
    The metrics, as `eval_loop.run`.

  Raises:
    ConfigError: if there is no checkpoint, or data that do not fit it.
    eval_loop.CorruptExampleError: if too many examples cannot be read.
  """
  processes.check_shared(workdir)
  compile_cache.enable(config)
  is_untrained = _is_untrained(config, workdir)
  mesh = mesh_lib.create(config, hosts=processes.hosts)
  strategy_lib.find(config).check_evaluation(config, mesh)
  config = run_dir.with_batch_size(config, workdir, mesh_lib.batch_devices(mesh))
  source = sources.open_source(config, training=False)
  agreement.check(processes, evaluation=source)
  if is_untrained:
    vocabulary = initial.vocabulary(config, source.vocabulary)
  else:
    vocabulary = run_dir.labels(workdir)
  source = label_mapping.map_labels(source, vocabulary)
  invocation = strategy_lib.Invocation(config, workdir, processes, 'evaluate', checkpoint, output)
  program = _build(invocation, mesh, objective_lib.create(vocabulary, config))
  if is_untrained:
    state, step = _initial_state(invocation, program, vocabulary), 0
  else:
    state, step = _restored_state(invocation, program)
  subject = Subject(
    config, workdir, program, source, step, config.init['from'] if is_untrained else ''
  )
  folder = _open_folder(invocation, step)
  stream = stream_lib.Stream(config, mesh_lib.batch_sharding(mesh))
  batches = processes.heartbeat_each(stream.evaluation(source), 'evaluating', step)
  scores, rows = _scores(subject, program.eval_state_fn(state), batches)
  if jax.process_index() == 0:
    processes.heartbeat('writing', step)
    _report(subject, folder, scores, rows)
  return scores


def of_training(subject: Subject, state, batches) -> dict:
  """Makes the evaluation that ends a training; process 0 writes its folder.

  Args:
    subject: of the run's last step.
    state: TrainState that is scored.
    batches: device batches of the whole split, in order.

  Returns:
    The metrics, as `eval_loop.run`.

  Raises:
    eval_loop.CorruptExampleError: if too many examples cannot be read.
  """
  scores, rows = _scores(subject, state, batches)
  if jax.process_index() == 0:
    name = f'{subject.step}-{_split(subject.config)}'
    folder = os.path.join(subject.workdir, analysis_page.FOLDER, name)
    try:
      _write(folder, subject, scores, _results(subject, rows))
    except Exception as e:  # noqa: BLE001 - costs the files, not the training
      logging.error('%s is not written: %s: %s', folder, type(e).__name__, e)
  return scores


def _is_untrained(config, workdir):
  """Whether there are weights to begin with, and no checkpoint."""
  if not run_dir.has_checkpoints(workdir):
    if not config.init['from']:
      raise config_lib.ConfigError(f'{workdir} has no checkpoint to evaluate')
    return True
  saved = run_dir.saved_config(workdir).get('init.from', '')
  if config.init['from'] not in ('', saved):
    raise config_lib.ConfigError(
      f'config.init.from={config.init["from"]!r} would not be scored: '
      f'{workdir} has checkpoints of its own; choose another --workdir'
    )
  return False


def _build(invocation, mesh, objective):
  """The programs of a run, for evaluation alone."""
  # No schedule matters.
  config = config_lib.replaced(invocation.config, {'schedule.warmup': '0 steps'})
  spec = run_spec.RunSpec(config, mesh, objective, config.batch_size, 1)
  config, _ = strategy_lib.find(config).calibrate(spec, invocation, training=False)
  return build.create(dataclasses.replace(spec, config=config))


def _initial_state(invocation, program, vocabulary):
  """The state of weights that nothing trained."""
  weights, lines = initial.load(
    invocation.config, program, vocabulary, gather=invocation.processes.gather, exact=True
  )
  if jax.process_index() == 0:
    print('\n'.join([*lines, _network_line(invocation.config)]))
  return state_lib.create(program.init_fn, program.abstract_state, weights)


def _restored_state(invocation, program):
  """The state of the checkpoint that is asked for, and its step."""
  checkpoints = manager.Checkpoints(
    invocation.workdir,
    invocation.config,
    None,
    program.saved_form.abstract,
    invocation.processes.gather,
  )
  restored = checkpoints.restore(invocation.checkpoint)
  checkpoints.close()
  if restored is None:
    raise config_lib.ConfigError(f'{invocation.workdir} has no checkpoint to evaluate')
  state, step = restored
  return program.saved_form.to_run(state), step


def _open_folder(invocation, step):
  """The folder of the evaluation; all processes know whether it can be made."""
  folder = os.path.expanduser(invocation.output) or os.path.join(
    invocation.workdir, analysis_page.FOLDER, _name(invocation.config, invocation.workdir, step)
  )
  problem = invocation.processes.gather(_make_folder(folder))[0]
  if problem:
    raise config_lib.ConfigError(problem)
  if jax.process_index() == 0:
    for line in _other_pixels(invocation.config, invocation.workdir):
      print(line)
  return folder


def _make_folder(folder):
  """Makes a folder, on process 0; returns why it cannot be, '' if it can."""
  if jax.process_index():
    return ''
  try:
    os.makedirs(folder, exist_ok=True)
  except OSError as e:
    return f'{folder} cannot be made: {e.strerror}'
  if not os.access(folder, os.W_OK):
    return f'{folder} cannot be written to'
  return ''


def _scores(subject, state, batches):
  """Scores and rows; raises where too many examples are lost."""
  source = subject.source
  held_out = _held_out(subject)
  scores, rows = eval_loop.examples(
    subject.program.examples_step(held_out=held_out), state, batches, len(source)
  )
  eval_loop.check_damage(subject.config, source, scores)
  return scores, rows


def _report(subject, folder, scores, rows):
  """Prints the scores, and writes the folder and the run's page."""
  results = _results(subject, rows)
  summary.print_scores(subject.step, scores | results.scores(), subject.weights)
  try:
    _write(folder, subject, scores, results)
    print(urls.remote_url(f'evaluation: {os.path.join(folder, analysis_page.PAGE)}'))
    if run_page.rewrite(subject.workdir, folder):
      print(urls.remote_url(f'report: {run_page.path(subject.workdir)}'))
  except OSError as e:
    raise ReportError(f'{e.filename or folder}: {e.strerror or e}') from e


def _results(subject, rows):
  vocabulary = subject.source.vocabulary
  return results_lib.Results(
    vocabulary, rows, run_dir.class_sizes(subject.workdir, len(vocabulary)), _held_out(subject)
  )


def _write(folder, subject, scores, results):
  """Writes the folder of an evaluation."""
  analysis_files.write(
    folder,
    subject.config,
    subject.source,
    results,
    {
      'step': subject.step,
      'weights': subject.weights,
      'data': subject.source.name,
      'damaged': len(subject.source) - scores['examples'],
      'scores': {
        name: value if math.isfinite(value) else None
        for name, value in (scores | results.scores()).items()
      },
    },
  )


def _held_out(subject):
  """Classes that the run had no training examples of."""
  saved = run_dir.saved_config(subject.workdir)
  names = {*saved.get('data.held_out', subject.config.data.held_out)}
  vocabulary = subject.source.vocabulary
  return tuple(i for i, name in enumerate(vocabulary.names) if name in names)


def _other_pixels(config, workdir):
  """A line for each key by which images are not those of training."""
  saved, values = run_dir.saved_config(workdir), config_lib.flat(config)
  for key in _PIXELS:
    trained = saved.get(key, values[key])
    if list(np.ravel(trained)) != list(np.ravel(values[key])):
      yield (f'config.{key} is {values[key]!r}, and was {trained!r} in training')


def _network_line(config):
  d, m = config.data, config.model
  return (
    f'model    {m.name}; images of {d.image_size} pixels out of {d.resize}, '
    f'{d.decode}, mean {tuple(d.mean)}, std {tuple(d.std)}'
  )


def _name(config, workdir, step):
  """STEP-SPLIT; for other data than the run's, also whose."""
  saved, values = run_dir.saved_config(workdir), config_lib.flat(config)
  name = f'{step}-{_split(config)}'
  if not saved or all(saved.get(key, '') == values.get(key, '') for key in _SAME_DATA):
    return name
  path = config.data.get('path', '')
  path = path and os.path.abspath(os.path.expanduser(path))
  data = os.path.basename(path) or config.data.source
  return f'{name}-of-{_slug(data)}'


def _split(config):
  # A split file by its name; '.' is all of a folder.
  name = os.path.basename(config.data.eval_split.removesuffix('.txt'))
  return _slug(name) or 'all'


def _slug(text):
  return re.sub(r'[^\w-]+', '-', text).strip('-')
