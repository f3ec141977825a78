"""The example of a search with Optuna, on runs of main.py."""

import json
import pathlib

import pytest

from anp_jax.config import saved_run

optuna = pytest.importorskip('optuna')
pytest.importorskip('sklearn')

from scripts import optuna_search  # noqa: E402

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_FLAGS = [
  '--config=configs/lenet.py',
  '--config.log.every=5 steps',
  '--config.eval.every=1 epochs',
  '--config.log.tensorboard=False',
  '--config.eval.examples=False',
  '--config.checkpoint.keep_best=0',
]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
  monkeypatch.chdir(_ROOT)


def _validation(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [r for r in map(json.loads, lines) if r['kind'] == 'validation']


def test_two_trials_and_the_best_of_them(tmp_path, capsys):
  study = optuna.create_study(
    storage=f'sqlite:///{tmp_path / "study.db"}', study_name='search', direction='maximize'
  )
  # Else they are drawn at random, and a high rate may diverge.
  study.enqueue_trial({'rate': 0.01, 'decay': 1e-4})
  study.enqueue_trial({'rate': 0.003, 'decay': 1e-3})
  arguments = [f'--workdir={tmp_path}', '--trials=2', *_FLAGS]
  arguments.append('--config.duration=2 epochs')
  assert optuna_search.main(['', *arguments]) == 0
  best = json.loads(capsys.readouterr().out)
  scores = []
  for number in range(2):
    workdir = tmp_path / f'trial-00{number}'
    scores.append(max(r['anp_top1'] for r in _validation(workdir)))
    config = saved_run.read(str(workdir))
    if number == best['trial']:
      assert config['optimizer.learning_rate'] == best['rate']
      assert config['optimizer.weight_decay'] == best['decay']
  assert best['value'] == max(scores) == scores[best['trial']]


class _PoorTrial(optuna.trial.FixedTrial):
  """A trial that is pruned at its first score."""

  reported = None

  def report(self, value, step):
    self.reported = value, step

  def should_prune(self):
    return self.reported is not None


def test_a_pruned_trial_has_saved(tmp_path):
  trial = _PoorTrial({'rate': 0.01, 'decay': 1e-4}, number=3)
  flags = [*_FLAGS, '--config.duration=5000 epochs']
  with pytest.raises(optuna.TrialPruned):
    optuna_search.objective(trial, str(tmp_path), flags)
  workdir = tmp_path / 'trial-003'
  first = _validation(workdir)[0]
  assert trial.reported[1] >= first['step'] > 0
  stopped = json.loads((workdir / 'stopped.json').read_text())
  assert trial.reported[1] <= stopped['step'] < stopped['total']
  assert (workdir / 'checkpoints' / str(stopped['step'])).is_dir()
