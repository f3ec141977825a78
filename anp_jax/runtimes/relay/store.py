"""The folders of a ring's models: their checkpoints, and who may write."""

import json
import os
import threading

from anp_jax import cluster
from anp_jax import config as config_lib
from anp_jax.checkpoint import manager as checkpoint_lib
from anp_jax.checkpoint import run_dir as workdir_lib
from anp_jax.data import sources
from anp_jax.data.input import corruption
from anp_jax.runtimes.relay import records as records_lib

MODELS = 'models'
_FILE = 'relay.json'


def claim(
  workdir: str, config, training: bool, parts, laps: int, models, vocabulary
) -> str:
  """Takes a workdir for a ring, unless another run's is there.

  Args:
    workdir: of the run.
    config: the run's config.
    training: whether the ring is to train; else its checkpoints are scored,
      and nothing is written.
    parts: examples of each station's part.
    laps: of each model.
    models: their texts.
    vocabulary: of the training data.

  Returns:
    Why the workdir cannot be had; '' if it can.
  """
  path = os.path.join(workdir, _FILE)
  now = {
    'parts': parts,
    'laps': laps,
    'models': models,
    'config': json.loads(config_lib.to_json(config)),
  }
  if os.path.exists(path):
    with open(path) as f:
      saved = json.load(f)
    if not training:  # scores are the same on any devices
      saved['parts'] = parts
    text = _difference(saved, now, config)
    if text:
      return f'{workdir} belongs to another {text}'
  elif not training:
    return f'{workdir} has no checkpoint of a ring to evaluate'
  if training:
    workdir_lib.open_or_refuse(workdir, config, vocabulary)
    with open(path + '.new', 'w') as f:
      json.dump(now, f, indent=1)
    os.replace(path + '.new', path)
  return ''


class Store:
  """Writes WORKDIR/models/NAME of the models that this process holds.

  Who holds a model has its folder for itself: before it goes to another
  process, its last save has to be done (`let_go`).

  Attributes:
    records: `records.Records`.
  """

  def __init__(
    self, config, workdir: str, candidates, source, like, every: int,
    training: bool,
  ):  # fmt: skip
    """Makes it; nothing is written yet.

    Args:
      config: the run's config.
      workdir: of the run.
      candidates: all `candidates.Candidate`.
      source: of all training examples.
      like: model -> its TrainState of jax.ShapeDtypeStruct, as a restore gives
        it.
      every: steps between two records.
      training: whether the ring trains; else nothing is changed.
    """
    self._config = config
    self._workdir = workdir
    self._candidates = candidates
    self._source = source
    self._like = like
    self._every = every
    self._fingerprint = sources.fingerprint(source) if training else None
    self._saving, self._counting = threading.Lock(), threading.Lock()
    self._checkpoints, self._damaged, self._seen = {}, {}, {}
    self._expected_save_seconds = 0.0  # of models that have been let go
    self.records = records_lib.Records(
      config, self.folder, candidates, len(source)
    )

  def folder(self, model: int) -> str:
    """Of a model."""
    return os.path.join(self._workdir, MODELS, self._candidates[model].name)

  def checkpoints(self, model: int) -> checkpoint_lib.Checkpoints:
    """A model's, opened when they are first asked for."""
    if model not in self._checkpoints:
      own = self._candidates[model].config.copy_and_resolve_references()
      own.checkpoint.keep_best = 0
      self._checkpoints[model] = checkpoint_lib.Checkpoints(
        self.folder(model), own, self._fingerprint, self._like(model)
      )
    return self._checkpoints[model]

  def save(self, model: int, step: int, state) -> None:
    """Begins to save a model; one that is saved at this step stays."""
    with self._saving:
      self.checkpoints(model).save(step, state)

  def expected_save_seconds(self) -> float:
    """Seconds that a save takes beside all else; any thread may ask."""
    found = list(self._checkpoints.values())
    return max(
      (self._expected_save_seconds, *(c.expected_save_seconds() for c in found))
    )

  def let_go(self, model: int) -> None:
    """Returns once a model's last save is done, and its files are closed."""
    self.records.let_go(model)
    with self._saving:
      checkpoints = self._checkpoints.pop(model, None)
    if checkpoints:
      checkpoints.close()
      self._expected_save_seconds = max(
        self._expected_save_seconds, checkpoints.expected_save_seconds()
      )

  def wait(self) -> None:
    """Returns once all saves are done."""
    for checkpoints in self._checkpoints.values():
      checkpoints.wait()

  def close(self) -> None:
    """Waits, and releases all checkpoints and files."""
    self.records.close()
    for checkpoints in self._checkpoints.values():
      checkpoints.close()

  def measured(self, runner, model: int, step: int, metrics: dict) -> None:
    """Records what a step of a model showed.

    Raises:
      cluster.Failed: if too many examples cannot be read.
    """
    size = runner.config.batch_size
    with self._counting:
      self._damaged[model] = self._damaged.get(model, 0) + metrics['damaged']
      self._seen[model] = self._seen.get(model, 0) + size
      damaged, seen = int(self._damaged[model]), self._seen[model]
    text = corruption.too_many_error(
      self._config, damaged, seen, self._source.name
    )
    if text:
      raise cluster.Failed(text)
    if step % self._every and step != runner.itinerary.total:
      return
    self.records.train(model, step, {**metrics, 'damaged': damaged})


def _difference(saved, now, config):
  """What makes a workdir's ring another one; '' if nothing."""
  for key, what in (
    ('parts', 'ring: its stations have parts of'),
    ('laps', 'ring: its models make laps:'),
  ):
    if saved[key] != now[key]:
      return f'{what} {saved[key]}, not {now[key]}; choose another --workdir'
  if saved['models'] != now['models'][: len(saved['models'])]:
    return (
      'ring: config.strategy.models may only grow at its end; choose another '
      '--workdir'
    )
  text = config_lib.difference(saved['config'], config)
  return text and f'run: {text}; choose another --workdir'
