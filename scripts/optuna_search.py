"""Searches hyper-parameters with Optuna: an example to copy and change.

  pip install 'optuna>=5.0,<6'
  python -m scripts.optuna_search --workdir=runs/search --trials=20 \
    --config=configs/lenet.py --config.eval.every='1 epochs'

A trial is a run of main.py in WORKDIR/trial-NNN, with all flags but this
script's. One that is worse than the median of the trials before it is stopped
by SIGTERM, on which main.py saves. The same command adds trials to the study.
"""

import argparse
import json
import os
import subprocess
import sys
import time

import optuna

from anp_jax import config as config_lib
from anp_jax.config import exits
from anp_jax.reporting import telemetry

_METRIC = 'anp_top1'  # as metrics.jsonl has it, for plain classes too
_PERIOD = 0.5  # seconds between two looks at metrics.jsonl


def objective(trial: optuna.Trial, folder: str, flags: list[str]) -> float:
  """Trains a network; returns its best validation accuracy, 0 to 1."""
  values = {
    'optimizer.learning_rate': trial.suggest_float('rate', 1e-3, 0.1, log=True),
    'optimizer.weight_decay': trial.suggest_float('decay', 1e-5, 0.1, log=True),
  }
  workdir = os.path.join(folder, f'trial-{trial.number:03}')
  flags = [*flags, *(f'--config.{key}={v}' for key, v in values.items())]
  command = [sys.executable, 'main.py', f'--workdir={workdir}', *flags]
  with open(f'{workdir}.log', 'w') as log:
    # In a session of its own: Ctrl-C is this script's to pass on, once.
    run = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
  count = 0
  try:
    while run.poll() is None:
      time.sleep(_PERIOD)
      lines = [r for r in telemetry.read(workdir) if r['kind'] == 'validation']
      for line in lines[count:]:
        trial.report(line[_METRIC], line['step'])
      count = len(lines)
      if trial.should_prune():
        raise optuna.TrialPruned
  finally:
    run.terminate()  # which does nothing once it has ended
    run.wait()
  if run.returncode == 1:  # its loss is not finite, say; the log tells
    raise optuna.TrialPruned
  if run.returncode:
    raise config_lib.ConfigError(f'status {run.returncode}, see {workdir}.log')
  return telemetry.result(workdir)['best'][_METRIC]


@exits.with_status()
def main(argv: list[str]) -> int:
  """Prints the best trial as a line of JSON; 1 if none came to its end, 2 if one cannot run."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
  parser.add_argument('--workdir', required=True)
  parser.add_argument('--trials', type=int, default=20)
  arguments, flags = parser.parse_known_args(argv[1:])
  folder = arguments.workdir
  os.makedirs(folder, exist_ok=True)
  options = {'study_name': 'search', 'load_if_exists': True, 'direction': 'maximize'}
  pruner = optuna.pruners.MedianPruner(n_startup_trials=3)
  study = optuna.create_study(storage=f'sqlite:///{folder}/study.db', pruner=pruner, **options)
  study.optimize(lambda trial: objective(trial, folder, flags), arguments.trials)
  if not study.get_trials(states=[optuna.trial.TrialState.COMPLETE]):
    print(f'error: no trial came to its end, see {folder}', file=sys.stderr)
    return 1
  best = study.best_trial
  print(json.dumps({'trial': best.number, 'value': best.value, **best.params}))
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv))
