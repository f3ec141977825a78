"""The study's flags: what is wrong with them is one line, before anything is written."""

import pytest

from anp_jax.tools.study import __main__ as study_main
from tests import builders

_RATE = 'optimizer.learning_rate'
_CASES = {
  'grid': [
    (
      '--strategies=sync,synk',
      '--strategies=synk: expected one of sync, invariant, local_sgd, parameter_server, '
      "channel_split, model_ring, independent or FILE.toml; did you mean 'sync'?",
    ),
    ('--nodes=1,x', "--nodes='1,x': expected whole numbers from 1"),
    ('--devices_per_node=1,,2', "--devices_per_node='1,,2': expected whole"),
    ('--seeds=-1', "--seeds='-1': expected whole numbers from 0"),
    ('--target_accuracy=95', '--target_accuracy=95: expected numbers above 0'),
    ('--target_accuracy=0.9,', '--target_accuracy=0.9,: expected numbers above 0'),
    ('--strategy=sync', "unknown argument '--strategy=sync'; did you mean"),
    ('--config.strategy.period=3', 'belongs to strategy.name=local_sgd, not sync'),
    ('--config.seed=3', '--config.seed=3: the study sets it; use --seeds'),
    ('--config.ensemble.seeds=0:2', '--config.ensemble.seeds=0:2: the study sets it; use --seeds'),
    ('--config.duraton=3', "unknown key config.duraton; did you mean 'dur"),
    ('--config=configs/none.py', "no file 'configs/none.py'"),
    ('--workdir=', '--workdir is missing'),
    ('--scaling=week', "expected one of strong, weak; did you mean 'weak'?"),
  ],
  'vary': [
    ('--vary=strategy.mod=async', 'unknown key strategy.mod; did you mean'),
    ('--vary=strategy.mode=asinc', "config.strategy.mode='asinc': expected one of"),
    ('--vary=batch_size', '--vary=batch_size: expected KEY=VALUE,VALUE,...'),
    ('--vary=seed=1,2', '--vary=seed=1,2: the study sets it; use --seeds'),
    ('--vary=emulate.sleep=True,False --emulate', 'the study sets it; use --emulate'),
    ('--vary=emulate.step_seconds=1,2', 'the study sets it; use --emulate'),
    ('--vary=batch_size=8 --config.batch_size=16', 'batch_size is set twice'),
    ('--vary=strategy.servers=1,25%', "config.strategy.servers='25%': expected"),
    ('--vary=strategy.mode=async --strategies=sync', 'no run of the study has this key'),
    ('--vary=optimizer.name=lars,lamb --strategies=parameter_server', "name='lars': expected"),
  ],
  'emulate': [
    ('--emulate=step_secods=1', "--emulate: key 'step_secods': expected one of sleep, step_s"),
    ('--emulate=spread', "--emulate: 'spread': expected spread=VALUE"),
    ('--emulate=spread=wide', "config.emulate.spread='wide': expected a number"),
    ('--emulate=slow=3', "--emulate: slow='3': expected PROCESS:FACTOR, or several with +"),
    ('--emulate=slow=3:0', 'config.emulate.slow=((3, 0.0),): expected pairs'),
    ('--emulate=slow=4:2 --nodes=1,4', 'slow=4: expected a process below 4'),
    ('--emulate=spread=1,spread=2', '--emulate: spread is set twice'),
    ('--config.emulate.spread=2', '--config.emulate.spread=2: the study sets it; use --emulate'),
    (
      '--emulate --target_accuracy=0.5',
      '--target_accuracy=0.5: expected without --emulate: nothing is',
    ),
    ('--emulate --strategies=channel_split', 'config.emulate.enabled=True'),
  ],
  'simulate': [
    ('--workers=4', '--workers=4: expected with --simulate: otherwise'),
    ('--simulate --nodes=2', '--nodes=2: expected without --simulate: a run is one'),
    ('--simulate --workers=x', "--workers='x': expected whole numbers"),
    ('--simulate --emulate', '--emulate: expected without --simulate: times are'),
    ('--simulate=step_secods=1', "--simulate: key 'step_secods': expected one of "),
    ('--simulate --config.strategy.simulate.workers=4', 'the study sets it; use --workers'),
    ('--simulate --vary=strategy.simulate.workers=4', 'the study sets it; use --workers'),
    ('--simulate --strategies=invariant', 'no strategy of the study simulates workers'),
    (
      '--simulate --strategies=model_ring',
      '--simulate: not with model_ring, which trains many models',
    ),
  ],
  'tune': [
    ('--tune_budget=3 epochs', '--tune_budget=3 epochs: expected with --tune: '),
    (
      '--tune=ema=0,0.9 --emulate',
      '--tune=ema=0,0.9: expected without --emulate: nothing is learnt',
    ),
    ('--tune=optimizer.learning_rat=1', "learning_rat; did you mean 'optimizer.learning_rate'?"),
    (f'--tune={_RATE}=0.1 --tune={_RATE}=0.2', f'{_RATE} is set twice'),
    (f'--tune={_RATE}=0.1,x', f"config.{_RATE}='x': expected a number"),
    (f'--tune={_RATE}=1 --vary=duration=1 epochs,2 epochs', 'expected one duration'),
    (f'--tune={_RATE}=1 --tune_budget=many', "--tune_budget: 'many' is not a duration"),
    ('--tune=strategy.period=1,2 --strategies=sync', '--tune=strategy.period=1,2: '),
    (
      '--tune=ema=0,0.9 --strategies=model_ring',
      '--tune: not with model_ring, which trains many models',
    ),
  ],
}


@pytest.mark.parametrize('flags, words', [case for cases in _CASES.values() for case in cases])
def test_bad_flags_are_one_line(tmp_path, capsys, monkeypatch, flags, words):
  monkeypatch.setattr(study_main, '_train', pytest.fail)  # what is not refused would run
  command = ['strategies', '--config=configs/lenet.py', f'--workdir={tmp_path}']
  command += [
    '--strategies=sync,parameter_server',
    *(f'--{flag}' for flag in flags.removeprefix('--').split(' --')),
  ]
  assert study_main.main(command) == 2
  assert words in builders.error_line(capsys)
  assert not list(tmp_path.iterdir())
