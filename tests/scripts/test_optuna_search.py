"""The example of a search with Optuna, on runs of main.py."""

import json
import pathlib

import pytest

from anp_jax.config import saved_run

optuna = pytest.importorskip('optuna')

from scripts import optuna_search  # noqa: E402
from tests import launching  # noqa: E402

# In the place of main.py: its score is its learning rate.
_PRETEND = """\
import json, os, sys
flags = dict(a[2:].split('=', 1) for a in sys.argv[1:])
os.makedirs(flags['workdir'])
score = {'anp_top1': float(flags['config.optimizer.learning_rate'])}
lines = {'kind': 'validation', 'step': 1, **score}, {'kind': 'result', 'step': 1, 'best': score}
with open(os.path.join(flags['workdir'], 'metrics.jsonl'), 'w') as f:
  f.writelines(json.dumps(line) + '\\n' for line in lines)
with open('calls', 'a') as f:
  print(flags['config.optimizer.weight_decay'], flags['config.duration'], file=f)
"""


def test_two_trials_and_the_best_of_them(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(optuna_search, '_PERIOD', 0.01)
  pathlib.Path('main.py').write_text(_PRETEND)
  study = optuna.create_study(
    storage='sqlite:///study.db', study_name='search', direction='maximize'
  )
  for rate, decay in ((0.01, 0.05), (0.003, 0.025)):
    study.enqueue_trial({'rate': rate, 'decay': decay})
  arguments = ['', '--workdir=.', '--trials=2', '--config.duration=2_epochs']
  assert optuna_search.main(arguments) == 0
  best = json.loads(capsys.readouterr().out)
  assert best == {'trial': 0, 'value': 0.01, 'rate': 0.01, 'decay': 0.05}
  # The same command adds trials to the study.
  assert pathlib.Path('calls').read_text().split('\n')[:2] == ['0.05 2_epochs', '0.025 2_epochs']
  assert optuna_search.main(arguments) == 0
  assert pathlib.Path('trial-003').is_dir()


class _PoorTrial(optuna.trial.FixedTrial):
  """A trial that is pruned at its first score."""

  reported = None

  def report(self, value, step):
    self.reported = value, step

  def should_prune(self):
    return self.reported is not None


@pytest.mark.slow
def test_a_pruned_trial_has_saved(tmp_path, monkeypatch):
  monkeypatch.chdir(launching.ROOT)
  trial = _PoorTrial({'rate': 0.01, 'decay': 1e-4}, number=3)
  keys = launching.TINY | {'duration': '5000 epochs'}
  flags = ['--config=configs/resnet_anp.py:tiny', *launching.typed(keys)]
  with pytest.raises(optuna.TrialPruned):
    optuna_search.objective(trial, str(tmp_path), [*flags, '--config.eval.every=1 epochs'])
  workdir = tmp_path / 'trial-003'
  assert saved_run.read(str(workdir))['optimizer.learning_rate'] == 0.01
  stopped = json.loads((workdir / 'stopped.json').read_text())
  assert 0 < trial.reported[1] <= stopped['step'] < stopped['total']
  assert (workdir / 'checkpoints' / str(stopped['step'])).is_dir()
