"""The runs that are compared, from the files in their workdirs."""

import dataclasses
import glob
import os

from anp_jax import config as config_lib
from anp_jax.config import saved_run, strategy as strategy_lib, trust
from anp_jax.reporting import run_page, telemetry
from anp_jax.reporting.run_page import run_tables
from anp_jax.system import files
from anp_jax.tools.study import axes, named_strategies
from anp_jax.training import metric_labels

_CONFIG, _LABELS = 'config.json', 'labels.json'  # in a workdir
_MODELS = 'models'  # of a workdir of several models, a folder each, by index


@dataclasses.dataclass(frozen=True)
class Run:
  """A run, or one model of a run that has several.

  Attributes:
    path: folder of the run.
    name: shortest end of the path that no other run has.
    config: values by dotted key.
    train: lines of training from `run_tables.load`, each with the 'images' until then where
      they are known.
    validation: lines of validation, likewise.
    facts: facts of its page about the network and the devices; {} before its end.
    is_finished: whether it has ended; None: unknown.
    classes: content of labels.json.
  """

  path: str
  name: str
  config: dict
  train: list[dict]
  validation: list[dict]
  facts: dict[str, str]
  is_finished: bool | None
  classes: object

  @property
  def labels(self) -> dict[str, str]:
    """Labels of its metrics, by name."""
    names = set().union(*self.train[-1:], *self.validation)
    return metric_labels.labels(names)


def find(paths: list[str]) -> list[Run]:
  """Returns the runs of workdirs, and of folders that hold workdirs.

  Args:
    paths: paths in the order of the result; a run that two paths lead to is returned once.

  Raises:
    ConfigError: naming the path that leads to no run, or the file that cannot
      be read.
  """
  for baseline in named_strategies.BASELINES.values():  # ours, though a file names it by its class
    trust.allow({'strategy.name': baseline})
  by_path: dict[str, str] = {}
  for path in paths:
    for workdir in _workdirs(path):
      by_path.setdefault(os.path.realpath(workdir), workdir)
  workdirs = {os.path.abspath(workdir): workdir for workdir in by_path.values()}
  names = axes.short_names(workdirs, os.sep)
  return [run for path, workdir in workdirs.items() for run in _load(names[path], workdir)]


def _workdirs(path):
  """The workdirs in a folder, such as those of an ensemble's members, or the folder itself."""
  is_ensemble = bool(_is_workdir(path) and saved_run.read(path).get('ensemble.seeds'))
  if _is_workdir(path) and not is_ensemble:
    return [path]  # and no export in it
  inside = sorted(glob.glob(os.path.join(glob.escape(path), '*')))
  workdirs = [p for p in inside if _is_workdir(p)] or [path]
  if not _is_workdir(workdirs[0]):
    what = 'no run, and no folder that holds runs'
    if not os.path.isdir(path):
      what = 'no folder'
    raise config_lib.ConfigError(
      f'{path!r} is {what}: expected the workdir of a training{saved_run.nearest_run(path)}'
    )
  return workdirs


def _is_workdir(path):
  return os.path.isfile(os.path.join(path, _CONFIG))


def _load(name, workdir):
  """The run of a workdir, or one for each of its models."""
  saved = saved_run.read(workdir)
  config = config_lib.completed(saved)
  classes = files.read_json_object(os.path.join(workdir, _LABELS))
  # A comparison imports nothing else that a run's files name.
  strategy = strategy_lib.declared(config['strategy.name'])
  if strategy.keeps_models_apart:
    return [
      Run(
        folder,
        f'{name}/{os.path.basename(folder)}',
        values,
        *_lines(folder, values),
        {},
        None,
        classes,
      )
      for folder, values in _models(workdir, config)
    ]
  lines, is_finished = _lines(workdir, config), bool(telemetry.result(workdir))
  return [Run(workdir, name, config, *lines, run_page.facts(workdir), is_finished, classes)]


def _models(workdir, config):
  """Yields the folder and config of each model of a workdir."""
  keys = config_lib.known_keys(config['strategy.name'])
  strategy = strategy_lib.declared(config['strategy.name'])
  for index, texts in enumerate(strategy.alternatives(config)):
    changes = {k: keys[k].parse(k, v) for k, v in texts.items() if k in keys}
    # The list of models is no part of one model's config.
    model_config = {**config, **changes, 'strategy.models': ()}
    folder = os.path.join(workdir, _MODELS, f'{index:03}')
    yield folder, config_lib.completed(model_config)


def _lines(folder, config):
  """The lines of training and of validation, as `Run` has them."""
  batch_size = config['batch_size']
  train, validation = run_tables.load(folder, batch_size)
  if batch_size:
    for line in train + validation:
      line['images'] = line['step'] * batch_size
  return train, validation
