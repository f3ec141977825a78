"""Compares a ring of models with other ways to train them all.

  python -m anp_jax.tools.study model_ring --config=configs/model_ring_anp.py
    --workdir=runs/model_ring_study --stations=2

trains the models of config.strategy.models on so many processes of this
machine, a core each, or with --slurm of as many nodes, in every way of
--baselines:

  ring         the models travel
  sync         one model after another, its batch divided over the processes
  parts        each model on one process, while parts of the data set travel
  independent  each model on one process, which has all of the set in memory
  disk         each model on one process, which reads all of the set from its
               files in each epoch

Then it writes a table, and a chart of who did what when, to the workdir.
--config.KEY=VALUE is for all of them. With --data_set_gigabytes and
--disk_megabytes_per_second it also predicts from the measured rates how many
hours a ring saves on a set of that size and a disk that all stations share;
anp_jax/tools/study/hours.py has the formulas.

Times begin with the first step of training, once programs are compiled, and end
with the last score. What travels is counted by the system, on the loopback
interface or on those of the nodes. Status 0: all came to their end; 1: one did
not; 2: bad input.
"""

import math
import os
import shlex
import shutil
import statistics
import sys

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, command_line, exits, outputs
from anp_jax.reporting import telemetry
from anp_jax.runtimes.model_ring import candidates, spans as spans_lib
from anp_jax.tools.study import launching, model_ring_page, slurm, usage


@exits.with_status('interrupted; the same command begins again')
def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  try:
    overrides, rest = command_line.split_overrides(arguments)
    flags = _flags(rest)
    config = command_line.load(flags.config, overrides)
    if config.strategy.name != 'model_ring':
      raise config_lib.ConfigError(
        f'config.strategy.name={config.strategy.name!r}: expected model_ring'
      )
    if flags.data_set_gigabytes and config.data.source == 'synthetic':
      raise config_lib.ConfigError(
        f'--data_set_gigabytes={flags.data_set_gigabytes:g}: '
        'config.data.source=synthetic is not read from files'
      )
    study = Study(flags, overrides, config)
    rows = study.run()
  except launching.RunFailedError as e:
    print(f'error: {e}', file=sys.stderr)
    return 1
  page = model_ring_page.Page(flags, study.models, study.laps)
  print(page.write(rows, arguments))
  return 0


def _flags(arguments):
  parser = argument_parser.Parser(
    prog='python -m anp_jax.tools.study model_ring', description=__doc__
  )
  parser.add_argument('--config', help='FILE[:VARIANT], and --config.KEY=VALUE')
  parser.add_argument('--workdir', help='folder of the study')
  parser.add_argument('--stations', type=int, default=2, help='processes')
  parser.add_argument(
    '--baselines',
    default='ring,sync,parts',
    metavar='WAYS',
    help=f'of {", ".join(model_ring_page.WAYS)} (default: %(default)s)',
  )
  parser.add_argument(
    '--data_set_gigabytes',
    type=float,
    metavar='S',
    help='of the files (1e9 bytes): predict the hours for such a set',
  )
  parser.add_argument(
    '--disk_megabytes_per_second',
    type=float,
    metavar='B',
    help='from which all stations of that prediction read (1e6 bytes)',
  )
  slurm.add_flag(parser)
  flags = parser.parse(arguments)
  for name in ('config', 'workdir'):
    if not getattr(flags, name):
      raise config_lib.ConfigError(f'--{name} is missing')
  outputs.check_folder('--workdir', flags.workdir)
  if flags.stations < 1:
    raise config_lib.ConfigError(f'--stations={flags.stations}: expected 1 or more')
  flags.baselines = baselines(flags.baselines)
  _check_prediction(flags)
  return flags


def baselines(text: str) -> tuple[str, ...]:
  """Returns the ways of a list such as 'ring,disk', the ring first.

  Raises:
    ConfigError: for one that there is not, and without the ring.
  """
  ways = model_ring_page.WAYS
  names = [name.strip() for name in text.split(',')]
  for name in names:
    if name not in ways:
      raise config_lib.ConfigError(
        f'--baselines={text}: no way {name!r} (have: {", ".join(ways)})'
        f'{config_lib.nearest(name, ways)}'
      )
  if model_ring_page.RING not in names:
    raise config_lib.ConfigError(
      f'--baselines={text}: expected ring among them, with which the others are compared'
    )
  return tuple(way for way in ways if way in names)


def _check_prediction(flags):
  """Refuses half of the flags of a prediction, and no numbers above 0."""
  names = 'data_set_gigabytes', 'disk_megabytes_per_second'
  values = [getattr(flags, name) for name in names]
  for name, value, other in zip(names, values, reversed(values)):
    if value is None and other is not None:
      raise config_lib.ConfigError(f'--{name} is missing')
    if value is not None and not 0 < value < math.inf:
      raise config_lib.ConfigError(f'--{name}={value}: expected a number above 0')


class Study:
  """The ways to train the models, and their numbers.

  Attributes:
    stations: processes of each way.
    models: what differs in each.
    laps: of each way; epochs.
  """

  def __init__(self, flags, overrides, config):
    self.stations = flags.stations
    self._flags = flags
    self._overrides = overrides
    self.models = [
      [part.strip() for part in text.split(';') if part.strip()] for text in config.strategy.models
    ]
    self._batch_sizes = [c.config.batch_size for c in candidates.create(config, devices=1)]
    self.laps = candidates.laps('duration', config.duration)
    self._ring = os.path.join(flags.workdir, model_ring_page.RING)
    os.makedirs(flags.workdir, exist_ok=True)

  def run(self) -> list[dict]:
    """Runs each way from the beginning; returns the numbers of each."""
    rows = []
    for way in self._flags.baselines:
      print(f'{model_ring_page.WAYS[way]}: begins', flush=True)
      if way == model_ring_page.RING:
        measured = self._in_a_ring()
      elif way == 'sync':
        measured = self._one_by_one()
      else:
        measured = self._without_a_ring(way)
      rows.append({'way': way, **measured})
    return rows

  def turns(self, folder: str, models: int) -> dict:
    """Measures the turns of a ring from its spans.

    Returns:
      turn_seconds, of each model in all, were every turn its median one;
      step_seconds, of each model, the median of its turns; score_seconds, in
      all; send_seconds, median, and byte_seconds, that of each byte sent;
      hand_over, relative to the median turn; most_steps of a turn.

    Raises:
      launching.RunFailedError: if a model did not come to its end.
    """
    spans = spans_lib.read(folder)
    turns = [s for s in spans if s['what'] == 'train']
    failed = {s['model'] for s in turns if 'steps' not in s}
    if failed:
      names = ', '.join(' '.join(self.models[m]) for m in sorted(failed))
      raise launching.RunFailedError(
        f'{folder}: not finite: {names}; models that come to their end are compared'
      )
    by_model = [[s for s in turns if s['model'] == m and s['steps']] for m in range(models)]
    # A ring of one station sends nothing.
    sends = [(_seconds(s), s['bytes']) for s in spans if s.get('bytes')]
    sends = sends or [(0.0, 1)]
    send_seconds = statistics.median(seconds for seconds, _ in sends)
    return {
      'turn_seconds': [len(spans) * statistics.median(map(_seconds, spans)) for spans in by_model],
      'step_seconds': [
        statistics.median(_seconds(s) / s['steps'] for s in spans) for spans in by_model
      ],
      'send_seconds': send_seconds,
      'byte_seconds': statistics.median(t / size for t, size in sends),
      'score_seconds': sum(_seconds(s) for s in spans if s['what'] == 'score'),
      'hand_over': send_seconds / statistics.median(map(_seconds, turns)),
      'most_steps': max(s['steps'] for s in turns),
    }

  def _in_a_ring(self):
    sent = self._launch(launching.TRAIN, self._ring)
    return self._measured(self._ring, sent)

  def _one_by_one(self):
    seconds = sent = 0.0
    folders = []
    for i, model in enumerate(self.models):
      folder = os.path.join(self._flags.workdir, f'sync-{i:03}')
      folders.append(folder)
      differs = dict(text.split('=', 1) for text in model)
      sent += self._launch(launching.TRAIN, folder, {'strategy.name': 'sync', **differs})
      records = telemetry.read(folder)
      timed = [r for r in records if r.get('seconds')]
      begin = timed[0]['time'] - timed[0]['seconds']
      # Rates count from after the first step.
      first = timed[0]['seconds'] / max(timed[0]['step'] - 1, 1)
      seconds += max(r['time'] for r in records) - begin + first
    measured = {'seconds': seconds, 'use': None, 'sent': sent}
    return measured | self.used(folders)

  def _without_a_ring(self, way):
    folder = os.path.join(self._flags.workdir, way)
    program = ['-m', 'anp_jax.tools.study.model_ring_baselines', f'--way={way}']
    return self._measured(folder, self._launch(program, folder))

  def _measured(self, folder, sent):
    """Returns the numbers of a way whose processes wrote spans."""
    turns = self.turns(folder, len(self.models))
    image_seconds = statistics.fmean(
      seconds / size for seconds, size in zip(turns['step_seconds'], self._batch_sizes)
    )
    return {
      **self.from_spans(folder, sent),
      **turns,
      **self.used([folder]),
      'image_seconds': image_seconds,
    }

  def used(self, folders: list[str]) -> dict:
    """Returns what the processes of a way's runs used.

    Returns:
      read, MB that each station read from files, in all runs; peak, MB of the
      largest process; image_bytes of a file, 0 if none was read.
    """
    processes = [p for folder in folders for p in usage.read(folder)]
    size, images = (sum(p[name] for p in processes) for name in ('read_bytes', 'read_images'))
    return {
      'read': size / self.stations / 1e6,
      'peak': max(p['peak_bytes'] for p in processes) / 1e6,
      'image_bytes': size / images if images else 0.0,
    }

  def from_spans(self, folder: str, sent: float) -> dict:
    """Returns seconds, use and MB of a run that wrote spans."""
    spans = spans_lib.read(folder)
    begin = min(s['start'] for s in spans if s['what'] == 'train')
    end = max(s['end'] for s in spans if s['what'] in ('train', 'score'))
    busy = sum(
      max(s['end'] - max(s['start'], begin), 0.0)
      for s in spans
      if s['what'] in model_ring_page.WORK
    )
    return {
      'seconds': end - begin,
      'use': busy / (end - begin) / self.stations,
      'sent': sent,
      'moved': sum(s.get('bytes', 0) for s in spans) / 1e6,
    }

  def _launch(self, program, folder, changes=None):
    """Runs the processes of one way; returns the MB that interfaces sent."""
    shutil.rmtree(folder, ignore_errors=True)
    spec = self._flags.config
    # One network by itself has no keys of a ring.
    overrides = command_line.applying(spec, self._overrides | (changes or {}))
    program = ['-m', usage.__name__, *program]
    arguments = [
      f'--config={spec}',
      f'--workdir={folder}',
      *(f'--config.{key}={value}' for key, value in overrides.items()),
    ]
    if self._flags.slurm is None:
      cores = sorted(os.sched_getaffinity(0))
      return launching.launch(program, folder, self.stations, arguments, cores)
    options = shlex.split(self._flags.slurm)
    slurm.launch(program, folder, self.stations, arguments, options)
    return sum(p['sent_bytes'] for p in usage.read(folder)) / 1e6


def _seconds(span):
  return span['end'] - span['start']
