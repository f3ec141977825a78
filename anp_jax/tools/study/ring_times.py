"""The times of a run of many models, from the spans of its stations."""

import dataclasses
import os
import pathlib
import shutil
import statistics

import numpy as np

from anp_jax import config as config_lib
from anp_jax.runtimes.model_ring import (
  leaderboard,
  model_ring_cost,
  ring as ring_lib,
  spans as spans_lib,
)
from anp_jax.system import files

_RING = 'model_ring.json'
_WORK = 'train', 'score'


@dataclasses.dataclass(frozen=True, eq=False)
class RingTimes:
  """What the stations of a run did, and when.

  Attributes:
    models: text of what differs in each model.
    images: images that all models were trained on.
    seconds: time from the first step to the last score.
    use: share of the stations' time in which they train or score.
    occupancy: share of the stations' time that the schedule fills if nothing else costs time.
    over_ideal: `seconds` over the time without waiting, in which each turn takes the median of
      its model.
    hand_over: median time to send a model over the median turn.
    work: spans of training and scoring.
  """

  models: list[str]
  images: int
  seconds: float
  use: float
  occupancy: float
  over_ideal: float
  hand_over: float
  work: list[dict]


def start(
  workdir: str, models: list[str], examples: int, laps: ring_lib.Laps, stations: int
) -> None:
  """Prepares the files of a run that starts; removes those of an earlier one."""
  for folder in ('spans', 'models'):
    shutil.rmtree(os.path.join(workdir, folder), ignore_errors=True)
  pathlib.Path(workdir, leaderboard.LOG).unlink(missing_ok=True)
  record = {'parts': [examples], 'laps': laps.total, 'models': models, 'stations': stations}
  files.write_json(os.path.join(workdir, _RING), record)


def read(workdir: str) -> RingTimes:
  """Reads a finished run; the pause of a run that was stopped and resumed counts.

  Raises:
    ConfigError: if a model did not reach its end, since only whole runs are compared.
  """
  run = files.read_json_object(os.path.join(workdir, _RING))
  spans = spans_lib.read(workdir)
  turns = [s for s in spans if s['what'] == 'train']
  failed = sorted({s['model'] for s in turns if 'steps' not in s})
  if failed or not turns:
    names = ', '.join(run['models'][m] for m in failed) or 'no model was trained'
    raise config_lib.ConfigError(f'not finite: {names}; only models that finish are compared')
  work = [s for s in spans if s['what'] in _WORK]
  first = min(s['start'] for s in turns)
  seconds = max(s['end'] for s in work) - first
  busy = sum(max(s['end'] - max(s['start'], first), 0.0) for s in work)
  # A process without a model has no span.
  stations = run.get('stations', 1 + max(s['station'] for s in spans))
  models, laps = len(run['models']), run['laps']
  is_ring = len({(s['model'], s['station']) for s in turns}) > models
  slots = (
    model_ring_cost.slots(models, stations, laps) if is_ring else laps * -(-models // stations)
  )
  visits = models * laps * (stations if is_ring else 1)
  occupancy = visits / slots / stations
  by_model = [[_seconds(s) for s in turns if s['model'] == m and s['steps']] for m in range(models)]
  ideal = sum(len(times) * statistics.median(times) for times in by_model)
  ideal += sum(_seconds(s) for s in work if s['what'] == 'score')
  # A ring of one station sends nothing.
  sends = [_seconds(s) for s in spans if s.get('bytes')] or [0.0]
  return RingTimes(
    models=run['models'],
    images=models * laps * sum(run['parts']),
    seconds=seconds,
    use=busy / seconds / stations,
    occupancy=occupancy,
    over_ideal=seconds * stations * occupancy / ideal,
    hand_over=statistics.median(sends) / statistics.median(map(_seconds, turns)),
    work=work,
  )


def best_scores(workdir: str, times: RingTimes) -> list[dict]:
  """Returns the scores of the model with the best accuracy, a dict per lap.

  Each has `samples`, the images that the model was trained on, and `seconds` since the first
  step of the run.
  """
  records = files.read_json_lines(os.path.join(workdir, leaderboard.LOG))
  last = {r['model']: r['anp_top1'] for r in records if 'anp_top1' in r}
  if not last:
    raise config_lib.ConfigError('no model was scored')
  best = max(last, key=lambda model: np.nan_to_num(last[model], nan=-1))
  run = files.read_json_object(os.path.join(workdir, _RING))
  first = min(s['start'] for s in times.work)
  ends = {(s['model'], s['lap']): s['end'] for s in times.work if s['what'] == 'score'}
  return [
    r
    | {
      'samples': r['laps'] * sum(run['parts']),
      'seconds': ends.get((best, r['laps']), r['time']) - first,
    }
    for r in records
    if r['model'] == best and 'anp_top1' in r
  ]


def _seconds(span):
  return span['end'] - span['start']
