"""Compares a ring of models with other ways to train them all.

  python -m anp_jax.tools.study model_ring --config=configs/model_ring_anp.py
    --workdir=runs/model_ring_study --stations=2

trains the models of config.strategy.models on so many processes of this
machine, a core each, in three ways:

  ring         the models travel
  sync         one model after another, its batch divided over the processes
  independent  each model on one process, which has all of the set in memory

Then it writes a table, and a chart of who did what when, to the workdir.
--config.KEY=VALUE is for all of them.

Times begin with the first step of training, once programs are compiled, and end
with the last score. What travels is counted by the system, on the loopback
interface. Status 0: all came to their end; 1: one did
not; 2: bad input.
"""

import os
import shutil
import statistics
import sys

from anp_jax import config as config_lib
from anp_jax.config import argument_parser, command_line, exits, outputs, strategy as strategy_lib
from anp_jax.reporting import telemetry
from anp_jax.runtimes.model_ring import candidates, spans as spans_lib
from anp_jax.tools.study import launching, model_ring_page


@exits.with_status('interrupted; the same command begins again')
def main(arguments: list[str]) -> int:
  """Returns the process's exit status."""
  try:
    overrides, rest = command_line.split_overrides(arguments)
    flags = _flags(rest)
    config = command_line.load(flags.config, overrides)
    if not strategy_lib.find(config).keeps_models_apart:
      raise config_lib.ConfigError(
        f'config.strategy.name={config.strategy.name!r}: expected model_ring'
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
  parser.add_argument('--config', help='recipe, FILE[:VARIANT], with any --config.KEY=VALUE')
  parser.add_argument('--workdir', help='study folder')
  parser.add_argument('--stations', type=int, default=2, help='number of processes')
  flags = parser.parse(arguments)
  for name in ('config', 'workdir'):
    if not getattr(flags, name):
      raise config_lib.ConfigError(f'--{name} is missing')
  outputs.check_folder('--workdir', flags.workdir)
  if flags.stations < 1:
    raise config_lib.ConfigError(f'--stations={flags.stations}: expected 1 or more')
  return flags


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
    self.laps = candidates.laps('duration', config.duration)
    self._ring = os.path.join(flags.workdir, model_ring_page.RING)
    os.makedirs(flags.workdir, exist_ok=True)

  def run(self) -> list[dict]:
    """Runs each way from the beginning; returns the numbers of each."""
    rows = []
    for way, measure in (
      (model_ring_page.RING, self._in_a_ring),
      ('sync', self._one_by_one),
      ('independent', self._independent),
    ):
      print(f'{model_ring_page.WAYS[way]}: begins', flush=True)
      rows.append({'way': way, **measure()})
    return rows

  def turns(self, folder: str, models: int) -> dict:
    """Measures the turns of a ring from its spans.

    Returns:
      turn_seconds, of each model in all, were every turn its median one;
      score_seconds, in all; hand_over, the median one relative to the median
      turn; most_steps of a turn.

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
    sends = [_seconds(s) for s in spans if s.get('bytes')] or [0.0]
    return {
      'turn_seconds': [len(spans) * statistics.median(map(_seconds, spans)) for spans in by_model],
      'score_seconds': sum(_seconds(s) for s in spans if s['what'] == 'score'),
      'hand_over': statistics.median(sends) / statistics.median(map(_seconds, turns)),
      'most_steps': max(s['steps'] for s in turns),
    }

  def _in_a_ring(self):
    sent = self._launch(launching.TRAIN, self._ring)
    return self._measured(self._ring, sent)

  def _one_by_one(self):
    seconds = sent = 0.0
    for i, model in enumerate(self.models):
      folder = os.path.join(self._flags.workdir, f'sync-{i:03}')
      differs = dict(text.split('=', 1) for text in model)
      sent += self._launch(launching.TRAIN, folder, {'strategy.name': 'sync', **differs})
      records = telemetry.read(folder)
      timed = [r for r in records if r.get('seconds')]
      begin = timed[0]['time'] - timed[0]['seconds']
      # Rates count from after the first step.
      first = timed[0]['seconds'] / max(timed[0]['step'] - 1, 1)
      seconds += max(r['time'] for r in records) - begin + first
    return {'seconds': seconds, 'use': None, 'sent': sent}

  def _independent(self):
    folder = os.path.join(self._flags.workdir, 'independent')
    program = ['-m', 'anp_jax.tools.study.model_ring_independent']
    return self._measured(folder, self._launch(program, folder))

  def _measured(self, folder, sent):
    """Returns the numbers of a way whose processes wrote spans."""
    return self.from_spans(folder, sent) | self.turns(folder, len(self.models))

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
    arguments = [
      f'--config={spec}',
      f'--workdir={folder}',
      *(f'--config.{key}={value}' for key, value in overrides.items()),
    ]
    return launching.launch(program, folder, self.stations, arguments)


def _seconds(span):
  return span['end'] - span['start']
