"""Jobs of a study that end after Ctrl-C has ended the study."""

import json
import os
import pathlib
import types

import pytest

from anp_jax import config as config_lib
from anp_jax.tools.study import __main__ as study_main, grid, local, slurm, study_runner
from tests import builders

_TINY = 'configs/resnet_anp.py:tiny'
_TRAIN = {'kind': 'train', 'step': 4, 'epoch': 0.4, 'seconds': 1.0}
_RESULT = {'kind': 'result', 'step': 4, 'time': 1.0}
_CELL = grid.Cell('sync', 1, 1, 0)


def _left(study, *records):
  """Leaves a workdir as the job of a cell does."""
  study_runner.begin(study, _CELL)
  saved = json.loads(config_lib.to_json(study.config(_CELL)))
  # What the run decides, it writes down decided.
  saved |= {'batch_size': saved['batch_size'] or 40, 'model.dtype': 'float32'}
  lines = ''.join(json.dumps(record) + '\n' for record in records)
  files = {'config.json': json.dumps(saved), 'metrics.jsonl': lines, 'study.job': '71'}
  builders.write_tree(pathlib.Path(study.workdir(_CELL)), files)


def _waiting(study, options, monkeypatch):
  """The cells that a study runs, with a launcher that runs none."""
  calls = []
  for module in (slurm, local):
    monkeypatch.setattr(module, 'run', lambda study, cells, *_: calls.extend(cells))
  progress = types.SimpleNamespace(
    begin=lambda *_: None, began=lambda *_: None, ended=lambda *_: None
  )
  assert study_main._train(study, [_CELL], options, progress) == {}
  return calls


def _study(tmp_path, **overrides):
  keys = {'model.dtype': 'auto', 'batch_size': '0'}
  keys |= {k.replace('__', '.'): v for k, v in overrides.items()}
  return study_runner.Study(_TINY, keys, str(tmp_path))


@pytest.mark.parametrize('options', ['', None])
@pytest.mark.parametrize('batch_size', ['0', '24'])
def test_a_run_with_a_result_is_not_run_again(tmp_path, monkeypatch, options, batch_size):
  study = _study(tmp_path, batch_size=batch_size)
  _left(study, _TRAIN, _RESULT)
  for _ in range(2):
    assert _waiting(study, options, monkeypatch) == []
  record = study_runner.record(study, _CELL)
  cores = len(os.sched_getaffinity(0)) if options is None else None
  assert record['cores'] == cores  # of this machine, or of nodes
  assert study_runner.is_finished(study, _CELL)


@pytest.mark.parametrize(
  'records',
  [
    (_TRAIN,),
    (),
    (_TRAIN, _RESULT, _TRAIN),  # it goes on, to another end
  ],
)
def test_what_has_no_result_is_run(tmp_path, monkeypatch, records):
  study = _study(tmp_path)
  _left(study, *records)
  assert _waiting(study, '', monkeypatch) == [_CELL]
  assert not study_runner.is_finished(study, _CELL)


@pytest.mark.parametrize(
  'key, text, values',
  [
    ('duration', '3 steps', ("'3 steps'", "'12 steps'")),
    ('batch_size', '48', ('48', '0')),
    ('model.dtype', 'bfloat16', ("'bfloat16'", "'auto'")),
    ('data.threads', '3', ('3', '0')),
  ],
)
@pytest.mark.parametrize('records', [(_TRAIN,), (_TRAIN, _RESULT)])
def test_a_run_of_other_keys_is_refused(tmp_path, monkeypatch, records, key, text, values):
  """Its numbers would be shown as those of the study."""
  study = _study(tmp_path)
  _left(study, *records)
  record = study_runner.record(study, _CELL)
  other = _study(tmp_path, **{key.replace('.', '__'): text})
  value, before = values
  words = f'config.{key}={value}: ', f' has {before}; choose another --workdir'
  builders.assert_refused(words, _waiting, other, '', monkeypatch)
  assert study_runner.record(study, _CELL) == record
