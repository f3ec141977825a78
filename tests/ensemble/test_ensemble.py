"""Members of an ensemble are the runs that ordinary commands make."""

import json
import math
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax import cluster, config as config_lib, experiment, train
from anp_jax.checkpoint import manager
from anp_jax.config import members, saved_run, strategy as strategy_lib
from anp_jax.data import sources
from anp_jax.ensemble import device_examples, ensemble_run, lane, member as member_lib, member_step
from anp_jax.reporting import telemetry
from anp_jax.runtimes.parameter_server import log as server_log
from tests import builders


@pytest.fixture(scope='module')
def quick_compiles():
  """Off: bits are compared of programs that XLA optimizes as in a run."""


_CLOCKED = ('time', 'seconds', 'images_per_second', 'input_wait')


def _config(**changes):
  """Digits, moved and mirrored, for some steps of a small network."""
  config = builders.on_small_network(builders.load('configs/lenet.py'))
  keys = {
    'data.augment': 'pad',
    'duration': '6 steps',
    'eval.every': '3 steps',
    'eval.examples': False,
    'checkpoint.every': '3 steps',
    'log.every': '2 steps',
    'batch_size': 32,
    'model.norm_group': 0,
  }
  return config_lib.replaced(config, keys | changes)


def _metrics(workdir):
  """The records of a run, without what depends on its clock."""
  return [
    {key: value for key, value in line.items() if key not in _CLOCKED}
    for line in telemetry.read(workdir)
  ]


def _train(config, workdir, devices=1):
  invocation = strategy_lib.Invocation(
    config, str(workdir), cluster.Processes(config), devices=jax.devices()[:devices]
  )
  return train.start(invocation)


@pytest.fixture(scope='module')
def alone(tmp_path_factory):
  """The workdirs of the seeds 0 to 2, each trained by an ordinary run."""
  folder = tmp_path_factory.mktemp('alone')
  for seed in range(3):
    _train(_config(seed=seed), folder / f'seed{seed}')
  return folder


def _saved(workdir):
  """The newest checkpoint's weights and moments as NumPy arrays."""
  opened = experiment.open(config_lib.from_flat(saved_run.read(str(workdir))), jax.devices()[:1])
  checkpoints = manager.Checkpoints(
    str(workdir),
    opened.config,
    sources.fingerprint(opened.source),
    opened.program.checkpoint_layout.abstract,
  )
  state, restored = checkpoints.restore()
  checkpoints.close()
  assert restored == 6
  return jax.tree.map(np.asarray, state)


def _assert_same(workdir, expected):
  jax.tree.map(np.testing.assert_array_equal, _saved(workdir), _saved(expected))


def _assert_near(workdir, expected):
  """Compares the states of two runs: float32, six steps of rate 0.01."""
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6),
    _saved(workdir),
    _saved(expected),
  )


_slow = pytest.mark.slow


@_slow
@pytest.mark.parametrize('devices', [1, 2, 4, 8])
def test_a_member_has_the_bits_of_its_run_alone(tmp_path, alone, devices, monkeypatch):
  """On a CPU, however many steps are made in a row, and devices the members divide over."""
  monkeypatch.setattr(lane, '_TURN', math.inf)
  _train(_config(**{'ensemble.seeds': '0:3'}), tmp_path, devices)
  for seed in range(3):
    member, run = tmp_path / f'seed{seed}', alone / f'seed{seed}'
    assert _metrics(member) == _metrics(run)
    _assert_same(member, run)


@_slow
def test_members_of_one_program_agree_to_rounding(tmp_path, alone):
  """Convolutions of several members are other operations."""
  _train(_config(**{'ensemble.seeds': '0:3', 'ensemble.together': 2}), tmp_path)
  for seed in range(3):
    _assert_near(tmp_path / f'seed{seed}', alone / f'seed{seed}')


@pytest.mark.parametrize(
  'strategy',
  [
    pytest.param({'look_ahead': 'dana'}, marks=_slow, id='dana'),
    pytest.param({'mode': 'rennala', 'parts': 4}, marks=pytest.mark.soak, id='rennala'),
    pytest.param(
      {'mode': 'synchronous', 'backup_workers': 2}, marks=pytest.mark.soak, id='backup_workers'
    ),
    pytest.param(
      {'name': 'local_sgd', 'groups': 4, 'period': 2}, marks=pytest.mark.soak, id='local_sgd'
    ),
  ],
)
def test_members_of_simulated_workers(tmp_path, strategy):
  """Each has an order of its own; as one program they agree to rounding."""
  keys = {'name': 'parameter_server', 'simulate.workers': 4, 'simulate.spread': 0.5} | strategy
  workers = {f'strategy.{key}': value for key, value in keys.items()}
  for seed in range(2):
    _train(_config(**workers, seed=seed), tmp_path / 'alone' / f'seed{seed}')
  for together in (1, 2):
    keys = {'ensemble.seeds': '0:2', 'ensemble.together': together}
    _train(_config(**workers, **keys), tmp_path / str(together))
  for seed in range(2):
    alone, in_turn, at_once = (tmp_path / name / f'seed{seed}' for name in ('alone', '1', '2'))
    assert _metrics(in_turn) == _metrics(alone)
    _assert_same(in_turn, alone)
    _assert_near(at_once, alone)
    logs = [server_log.read(str(workdir)) for workdir in (alone, at_once)]
    assert logs[0] == logs[1] and bool(logs[0]) == (workers['strategy.name'] != 'local_sgd')


@_slow
def test_a_step_of_one_member_copies_no_version(tmp_path):
  """With an axis of one member, XLA on a CPU copied the versions that workers still read."""
  keys = {'strategy.name': 'parameter_server', 'strategy.simulate.workers': 16, 'batch_size': 16}
  config = config_lib.replaced(builders.load('configs/lenet.py'), keys)
  opened = experiment.open(config, jax.devices()[:1])
  examples = device_examples.load(config, opened.source)
  device, state = lane.Device(opened, [config], examples), opened.new_state()[0]
  simulation = strategy_lib.find(config).simulation(opened.spec, str(tmp_path), 0)
  draws = device_examples.Drawing(config, opened.source, simulation).steps(0, 1)
  batch = device_examples.batch(config, examples, device_examples.Draws(*(x[0] for x in draws)))
  step = device._one.lower(state, device.numbers([config]), batch).compile()
  versions = sum(x.nbytes for x in jax.tree.leaves(state.opt_state.versions))
  assert step.memory_analysis().temp_size_in_bytes < versions / 2


@_slow
def test_more_seeds_train_later_and_a_finished_member_stays(tmp_path, alone):
  _train(_config(**{'ensemble.seeds': '0:1'}), tmp_path)
  before = (tmp_path / 'seed0' / 'metrics.jsonl').read_bytes()
  means = _train(_config(**{'ensemble.seeds': '0:3'}), tmp_path)
  assert (tmp_path / 'seed0' / 'metrics.jsonl').read_bytes() == before
  assert _metrics(tmp_path / 'seed2') == _metrics(alone / 'seed2')
  losses = [_metrics(alone / f'seed{seed}')[-1]['loss'] for seed in range(3)]
  assert means['loss'] == pytest.approx(np.mean(losses), rel=1e-12)
  saved = json.loads((tmp_path / ensemble_run.SUMMARY).read_text())
  assert [values['loss'] for values in saved['members'].values()] == losses


@_slow
@pytest.mark.parametrize('step', [2, 3])
def test_a_stopped_ensemble_goes_on_with_the_same_bits(tmp_path, alone, monkeypatch, capsys, step):
  """The signal comes at a step after which no save is due, or one is."""
  config = _config(**{'ensemble.seeds': '0:2'})
  record = member_lib.Member.record
  signals = [signal.SIGINT]

  def interrupted(member, first, values):
    if first <= step < first + len(values) and signals:  # a second one would end the process
      os.kill(os.getpid(), signals.pop())
    record(member, first, values)

  with monkeypatch.context() as patch:
    patch.setattr(member_lib.Member, 'record', interrupted)
    assert _train(config, tmp_path) == {}
  assert 'run the same command to resume' in capsys.readouterr().out
  assert os.path.exists(tmp_path / 'stopped.json')
  _train(config, tmp_path)
  assert not os.path.exists(tmp_path / 'stopped.json')
  for seed in range(2):
    _assert_same(tmp_path / f'seed{seed}', alone / f'seed{seed}')


@_slow
def test_a_run_of_one_network_is_left_alone(alone):
  """Its folder gets no members."""
  with pytest.raises(config_lib.ConfigError, match='has the checkpoints of one run'):
    _train(_config(**{'ensemble.seeds': '0:3'}), alone / 'seed0')
  assert not os.path.exists(alone / 'seed0' / 'seed0')


@_slow
def test_a_member_that_diverges_ends_alone(tmp_path, alone):
  rates = {'seed0': 0.01, 'huge': 1e30}
  configs = {
    str(tmp_path / name): _config(**{'optimizer.learning_rate': rate})
    for name, rate in rates.items()
  }
  processes = cluster.Processes(_config())
  ensemble = ensemble_run.Ensemble(configs, processes, jax.devices()[:1])
  scores, _ = ensemble.train()
  assert scores[str(tmp_path / 'huge')] == {}
  assert ensemble.step == ensemble.total_steps  # whatever has become of that member
  assert _metrics(tmp_path / 'seed0') == _metrics(alone / 'seed0')


def test_an_ensemble_with_a_lost_member_fails(tmp_path, monkeypatch):
  scores = {str(tmp_path / f'seed{seed}'): {} for seed in range(2)}  # those that diverge have none
  monkeypatch.setattr(
    ensemble_run.Ensemble, 'train', lambda _: (scores, cluster.preemption.CONTINUE)
  )
  with pytest.raises(cluster.RunFailedError, match='2 of 2 members ended early'):
    _train(_config(**{'ensemble.seeds': '0:2'}), tmp_path)


def test_a_score_that_is_not_finite_leaves_the_summary_of_the_others(tmp_path, monkeypatch):
  values = {'seed0': {'loss': math.nan, 'anp_top1': 0.25}, 'seed1': {'loss': 2.0, 'anp_top1': 0.75}}
  monkeypatch.setattr(
    ensemble_run.Ensemble, 'train', lambda _: (values, cluster.preemption.CONTINUE)
  )
  _train(_config(**{'ensemble.seeds': '0:2'}), tmp_path)
  saved = json.loads((tmp_path / ensemble_run.SUMMARY).read_text())
  assert [m['loss'] for m in saved['members'].values()] == [None, 2.0]
  assert saved['mean'] == {'loss': None, 'anp_top1': 0.5} and saved['interval']['loss'] is None
  # Student's t with one degree of freedom at 97.5 %: tan(0.475 pi); the mean's error is 0.25.
  assert saved['interval']['anp_top1'] == pytest.approx(0.25 * math.tan(0.475 * math.pi))


_NUMBERS = {
  'seed': (1, 2),
  'optimizer.learning_rate': (0.01, 0.02),
  'optimizer.momentum': (0.5, 0.9),
  'optimizer.weight_decay': (1e-3, 1e-2),
  'label_smoothing': (0.1, 0.3),
}


@_slow
def test_numbers_of_members_act_as_constants_do():
  """All at once: float64 steps of one program against a step compiled for each config."""
  with jax.enable_x64():
    wide = {'model.dtype': 'float64', 'model.param_dtype': 'float64', 'data.augment': 'strong_pad'}
    configs = [
      _config(**wide, **{key: values[i] for key, values in _NUMBERS.items()}) for i in range(2)
    ]
    assert len({members.program_key(c) for c in configs}) == 1
    device = jax.devices()[:1]
    opened = [experiment.open(config, device) for config in configs]
    step = member_step.MemberStep.create(opened[0].program, configs)
    assert step.varied == members.NUMBERS
    examples = device_examples.load(configs[0], opened[0].source)
    draws = [device_examples.Drawing(c, opened[0].source).steps(3, 2) for c in configs]
    states = [o.new_state()[0] for o in opened]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    draws = device_examples.Draws(*map(np.stack, zip(*draws, strict=True)))
    state, values = jax.jit(step.many)(stacked, step.numbers(configs), examples, draws, np.int32(2))
    for i, ordinary in enumerate(opened):
      feed = ordinary.batches(3)
      expected, rows = states[i], []
      for _ in range(2):
        expected, row = ordinary.program.train_step(expected, next(feed))
        rows.append(row)
      feed.close()
      # The order of sums differs; nothing else does.
      jax.tree.map(
        lambda x, y, i=i: np.testing.assert_allclose(x[i], y, rtol=1e-9, atol=1e-12),
        state,
        expected,
      )
      np.testing.assert_allclose(values[i], np.stack(rows), rtol=1e-9, atol=1e-12)


# Images below 8 pixels a side are mirrored, but not padded.
@pytest.mark.parametrize('augment, side', [('none', 16), ('pad', 16), ('pad', 7)])
@pytest.mark.parametrize('balance', ['none', 'sample'])
def test_batches_on_the_device_are_those_of_the_input(augment, side, balance):
  """To the bit, at the begin and past the first epoch."""
  sizes = {'data.image_size': side, 'data.resize': side}
  config = _config(**{'data.augment': augment, 'data.balance': balance, 'seed': 5}, **sizes)
  opened = experiment.open(config, jax.devices()[:1])
  examples = device_examples.load(config, opened.source)
  drawing = device_examples.Drawing(config, opened.source)
  batch = jax.jit(device_examples.batch, static_argnums=0)
  frozen = config_lib.replaced(config, {})
  for start in (0, 50):
    feed = opened.batches(start)
    draws = drawing.steps(start, 2)
    for i in range(2):
      cut = batch(frozen, examples, jax.tree.map(lambda x, i=i: x[i], draws))
      expected = next(feed)
      assert cut.keys() == expected.keys()
      jax.tree.map(np.testing.assert_array_equal, cut, expected)
    feed.close()


def test_as_many_members_as_fit_train_together():
  """A member needs 10 bytes; their number is halved until they fit, and one always trains."""
  needed = (10).__mul__
  assert lane.fitting(16, 45, needed) == 4
  assert lane.fitting(16, 160, needed) == 16
  assert lane.fitting(5, 30, needed) == 3
  assert lane.fitting(16, 5, needed) == 1


@pytest.mark.parametrize(
  'changes, text',
  [
    ({'data.augment': 'crop'}, "config.data.augment='crop': expected none, pad or strong_pad"),
    (
      {'strategy.name': 'invariant', 'strategy.threads': '8'},
      "config.strategy.name='invariant': expected a strategy",
    ),
    ({'emulate.enabled': 'True', 'emulate.step_seconds': '1'}, "ensemble.seeds='0:2'.*emulate"),
    # It has no one step.
    ({'strategy.name': 'parameter_server'}, "ensemble.seeds='0:2'.*parameter_server"),
  ],
)
def test_what_does_not_suit_an_ensemble_is_refused(tmp_path, changes, text):
  keys = {'ensemble.seeds': '0:2', **changes}
  builders.assert_refused(text, lambda: _train(builders.load('configs/lenet.py', keys), tmp_path))


@pytest.mark.parametrize('text', ['3', '2:2', '5:1', 'a:b'])
def test_seeds_that_are_no_window_are_refused(text):
  words = ['config.ensemble.seeds=', 'first:last']
  builders.assert_refused(words, builders.load, 'configs/lenet.py', {'ensemble.seeds': text})


def test_seeds_of_an_imbalanced_set_are_no_ensemble(tmp_path):
  """Each seed keeps other examples, and members share theirs."""
  keys = {'data.imbalance': 2.0}
  with pytest.raises(config_lib.ConfigError, match='config.data.imbalance=2.0: expected 1'):
    _train(_config(**keys, **{'ensemble.seeds': '0:2'}), tmp_path)
  first, second = (_config(**keys, seed=seed) for seed in (0, 1))
  assert members.program_key(first) != members.program_key(second)
