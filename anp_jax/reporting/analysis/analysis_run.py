"""Mode evaluate: scores of a checkpoint on any examples of its classes."""

from collections.abc import Iterable
import dataclasses
import math
import os
import re

from absl import logging
import jax
import ml_collections
import numpy as np

from anp_jax import cluster, config as config_lib, experiment
from anp_jax.checkpoint import manager, run_dir
from anp_jax.checkpoint.weights import initial
from anp_jax.config import saved_run, strategy as strategy_lib, urls
from anp_jax.data import lexicons, sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.parallel import mesh as mesh_lib, state as state_lib
from anp_jax.reporting import run_page, summary
from anp_jax.reporting.analysis import (
  analysis_files,
  analysis_page,
  analysis_results as results_lib,
)
from anp_jax.system import compile_cache, files
from anp_jax.training import build, eval_loop

_SAME_DATA = ('data.source', 'data.path', 'data.lists', 'data.dir')
# What an image is to the network, whichever part of it is seen.
_PIXELS = ('data.image_size', 'data.resize', 'data.mean', 'data.std', 'data.decode')


class ReportError(cluster.RunFailedError):
  """The files of an evaluation could not be written."""


@dataclasses.dataclass(frozen=True)
class Subject:
  """The subject of an evaluation: a network, and examples.

  Attributes:
    config: config of the run.
    workdir: folder of the run.
    program: model and steps of the run.
    source: evaluated examples.
    step: step of the evaluated state.
    weights: source of the weights, if nothing trained them; else ''.
    lexicon: values of the classes, from `lexicons.Lexicons.by_class`.
  """

  config: ml_collections.ConfigDict
  workdir: str
  program: build.ModelAndSteps
  source: sources.Source
  step: int
  weights: str = ''
  lexicon: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def run(invocation: strategy_lib.Invocation) -> dict:
  """Scores a checkpoint and writes the folder of the evaluation.

  Args:
    invocation: command. The data of its config may be any with classes of the run;
      where the workdir has no checkpoint, the weights that config.init names are
      scored.

  Returns:
    The metrics, as `eval_loop.run`.

  Raises:
    ConfigError: if there is no checkpoint, or data or lexicons that do not fit it.
    eval_loop.CorruptExampleError: if too many examples cannot be read.
  """
  config, workdir, processes = invocation.config, invocation.workdir, invocation.processes
  processes.check_shared(workdir)
  compile_cache.enable(config)
  is_untrained = _is_untrained(config, workdir)
  opened = experiment.open_evaluation(config, workdir, processes)
  classes = opened.source.vocabulary
  tables = lexicons.read(classes, invocation.sentiment, invocation.emotions)
  lexicon = tables.by_class(classes.names)
  config, strategy = opened.config, strategy_lib.find(config)
  strategy.check_evaluation(config, opened.mesh)
  invocation = dataclasses.replace(invocation, config=config)
  chosen, _ = strategy.calibrate(opened.spec, invocation, training=False)
  # There are no updates, so no schedule has to fit their number.
  unscheduled = {'schedule.name': 'constant', 'schedule.warmup': '0 steps'}
  if 'period' in chosen.strategy:
    unscheduled['strategy.period'] = '1'
  opened = opened.with_config(config_lib.replaced(chosen, unscheduled))
  if is_untrained:
    state, step, weights = _initial_state(opened, processes), 0, config.init['from']
  else:
    state, step = _restored_state(invocation, opened.program)
    weights = ''
  subject = Subject(config, workdir, opened.program, opened.source, step, weights, lexicon)
  folder = _open_folder(invocation, step)
  stream = stream_lib.Stream(config, mesh_lib.batch_sharding(opened.mesh))
  batches = processes.heartbeat_each(stream.evaluation(opened.source), 'evaluating', step)
  scores, rows = _scores(subject, opened.program.eval_state_fn(state), batches)
  if jax.process_index() == 0:
    processes.heartbeat('writing', step)
    for line in tables.notes:
      print(line)
    _report(subject, folder, scores, rows)
  return scores


def of_training(
  subject: Subject, state: state_lib.TrainState, batches: Iterable[dict[str, jax.Array]]
) -> dict:
  """Runs the evaluation that ends a training; process 0 writes its folder.

  Args:
    subject: network and examples at the run's last step.
    state: state that is scored.
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
      files.unlink_links(os.path.dirname(folder), folder)
      results = _results(subject, rows)
      _write(folder, subject, scores | results.scores(), results)
    except Exception as e:  # noqa: BLE001 - costs the files, not the training
      logging.error('%s is not written: %s: %s', folder, type(e).__name__, e)
  return scores


def _is_untrained(config, workdir):
  """Returns whether there are weights to begin with, and no checkpoint."""
  if not saved_run.has_checkpoints(workdir):
    if not config.init['from']:
      raise config_lib.ConfigError(f'{workdir} has no checkpoint to evaluate')
    return True
  saved = saved_run.read(workdir).get('init.from', '')
  if config.init['from'] not in ('', saved):
    raise config_lib.ConfigError(
      f'config.init.from={config.init["from"]!r} would not be scored: '
      f'{workdir} has checkpoints of its own; choose another --workdir'
    )
  return False


def _initial_state(opened, processes):
  """Returns the state of weights that nothing trained."""
  program, config = opened.program, opened.config
  weights, lines = initial.load(
    config, program, opened.source.vocabulary, gather=processes.gather, exact=True
  )
  if processes.index == 0:
    print('\n'.join([*lines, _network_line(config)]))
  return program.new_state(weights)


def _restored_state(invocation, program):
  """Returns the state of the requested checkpoint, and its step."""
  checkpoints = manager.Checkpoints(
    invocation.workdir,
    invocation.config,
    None,
    program.checkpoint_layout.abstract,
    invocation.processes.gather,
  )
  restored = checkpoints.restore(invocation.checkpoint)
  checkpoints.close()
  if restored is None:
    raise config_lib.ConfigError(f'{invocation.workdir} has no checkpoint to evaluate')
  state, step = restored
  return program.checkpoint_layout.unpack(state), step


def _open_folder(invocation, step):
  """Returns the folder of the evaluation, created by process 0.

  Raises:
    ConfigError: on all processes, if it cannot be created.
  """
  folder = os.path.expanduser(invocation.output) or os.path.join(
    invocation.workdir, analysis_page.FOLDER, _name(invocation.config, invocation.workdir, step)
  )
  problem = ''
  if jax.process_index() == 0:
    try:
      if not invocation.output:
        files.unlink_links(os.path.dirname(folder), folder)
      os.makedirs(folder, exist_ok=True)
      problem = '' if os.access(folder, os.W_OK) else f'{folder} cannot be written to'
    except OSError as e:
      problem = f'{folder} cannot be made: {e.strerror}'
    for key, value, trained in _other_pixels(invocation.config, invocation.workdir):
      print(f'config.{key} is {value!r}, and was {trained!r} in training')
  if problem := invocation.processes.gather(problem)[0]:
    raise config_lib.ConfigError(problem)
  return folder


def _scores(subject, state, batches):
  """Returns scores and rows; raises where too many examples are lost."""
  source = subject.source
  step = subject.program.evaluation.examples()
  scores, rows = eval_loop.examples(step, state, batches, len(source))
  eval_loop.check_damage(subject.config, source, scores)
  return scores, rows


def _report(subject, folder, scores, rows):
  """Prints the scores, and writes the folder and the run's page."""
  results = _results(subject, rows)
  scores = scores | results.scores()
  summary.print_scores(subject.step, scores, subject.weights)
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
    vocabulary,
    rows,
    run_dir.class_sizes(subject.workdir, len(vocabulary)),
    _held_out(subject),
    subject.program.spec.objective.head.scores_all_combinations,
    subject.lexicon,
  )


def _write(folder, subject, scores, results):
  """Writes the folder of an evaluation."""
  changes = _other_pixels(subject.config, subject.workdir)
  analysis_files.write(
    folder,
    subject.config,
    subject.source,
    results,
    {
      'step': subject.step,
      'weights': subject.weights,
      'data': '; '.join([subject.source.name, *(f'{key}={value!r}' for key, value, _ in changes)]),
      'damaged': len(subject.source) - scores['examples'],
      'scores': {name: value if math.isfinite(value) else None for name, value in scores.items()},
    },
  )


def _held_out(subject):
  """Returns the classes without training examples."""
  saved = saved_run.read(subject.workdir)
  names = {*saved.get('data.held_out', subject.config.data.held_out)}
  vocabulary = subject.source.vocabulary
  return tuple(i for i, name in enumerate(vocabulary.names) if name in names)


def _other_pixels(config, workdir):
  """Yields each key by which images differ from those of training, with both values."""
  saved, values = saved_run.read(workdir), config_lib.flat(config)
  for key in _PIXELS:
    trained = saved.get(key, values[key])
    if list(np.ravel(trained)) != list(np.ravel(values[key])):
      yield key, values[key], trained


def _network_line(config):
  d, m = config.data, config.model
  if widths := d.get('widths', ()):
    return f'model    {m.name}; {" and ".join(map(str, widths))} features'
  return (
    f'model    {m.name}; images of {d.image_size} pixels out of {d.resize}, '
    f'{d.decode}, mean {tuple(d.mean)}, std {tuple(d.std)}'
  )


def _name(config, workdir, step):
  """Returns STEP-SPLIT, and what differs from the run: keys of pixels, the name of the data."""
  saved, values = saved_run.read(workdir), config_lib.flat(config)
  changes = (_slug(f'{key} {value}') for key, value, _ in _other_pixels(config, workdir))
  name = '-'.join([str(step), _split(config), *changes])
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
