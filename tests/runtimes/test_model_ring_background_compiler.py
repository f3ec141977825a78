"""Late candidates of a ring are compiled while its devices train."""

import threading
import time

import jax
import jax.monitoring
import pytest

from anp_jax import cluster
from anp_jax.runtimes.model_ring import (
  background_compiler,
  compiled as programs_lib,
  model_ring_run as model_ring_run,
  ring_runner as runner_lib,
  spans as spans_lib,
)
from tests import model_rings

pytestmark = pytest.mark.usefixtures('quick_compiles')


def _until(condition, seconds=60):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.005)


def test_a_value_is_computed_once_and_waits_for_no_other():
  once, calls, resume = programs_lib.Once(), [], threading.Event()

  def slow():
    calls.append('slow')
    resume.wait(60)
    return 'slow'

  values = []
  threads = [threading.Thread(target=lambda: values.append(once.get('a', slow))) for _ in range(3)]
  for thread in threads:
    thread.start()
  _until(lambda: calls)
  assert once.get('b', lambda: 'quick') == 'quick' and not values
  resume.set()
  for thread in threads:
    thread.join()
  assert values == ['slow'] * 3 and calls == ['slow']
  once.forget('a')
  assert once.get('a', lambda: 'second') == 'second'


def test_an_error_of_a_computation_is_raised_in_all_threads():
  once = programs_lib.Once()

  def fails():
    raise MemoryError('no room')

  for make in (fails, lambda: 'never'):
    with pytest.raises(MemoryError, match='no room'):
      once.get('a', make)


def test_programs_of_models_that_left_are_released():
  def alive():
    return len(jax.devices()[0].client.live_executables())

  programs, x = programs_lib.Programs(), jax.ShapeDtypeStruct((3,), 'float32')
  before, functions = alive(), []
  # 0 and 1 have the same text, like models that differ in their seed.
  for model, factor in ((0, 2.0), (1, 2.0), (2, 3.0)):
    functions.append(jax.jit(lambda x, f=factor: x * f))
    programs.get(model, functions[-1], x)
  assert alive() == before + 2
  for model, left in ((0, 2), (2, 1), (1, 0)):
    programs.release(model)
    functions[model].clear_cache()
    assert alive() == before + left


def test_no_more_models_ahead_than_fit_in_the_ring():
  compiled = []
  compiler = background_compiler.BackgroundCompiler(
    'ahead', range(3, 9), 2, lambda model, _: compiled.append(model), None
  )

  def assert_compiled(*models):
    _until(lambda: len(compiled) >= len(models))
    time.sleep(0.02)  # in which a further one would begin
    assert compiled == [*models]

  compiler.start()
  assert_compiled(3, 4)
  compiler.on_arrival(0)  # which was there from the beginning
  assert_compiled(3, 4)
  compiler.on_arrival(3)
  assert_compiled(3, 4, 5)
  compiler.on_retired(6)  # failed before it came here
  compiler.on_arrival(4)
  assert_compiled(3, 4, 5, 7)
  compiler.stop()
  compiler.join()
  compiler.on_arrival(5)
  assert compiled == [3, 4, 5, 7]


def test_a_stop_waits_for_the_program_in_progress_only():
  programs, resume = [], threading.Event()

  def work(model, stopped):
    for program in range(4):
      if stopped():
        return
      programs.append((model, program))
      resume.wait(60)

  compiler = background_compiler.BackgroundCompiler('ahead', (0, 1), 2, work, None)
  compiler.start()
  _until(lambda: programs)
  compiler.stop()
  resume.set()
  compiler.join()
  assert programs == [(0, 0)]


# Of unlike structure, so that none has a text that another had before.
_MODELS = (
  'seed=1',
  'optimizer.name=adam; optimizer.learning_rate=1e-3',
  'model.name=tests.user_network:SmallNet; ema=0.9',
)


@pytest.fixture
def compiles():
  """Yields a growing list: the thread and the program of each compile."""
  events = []

  def on_event(event, seconds, fun_name='', **_):
    del seconds
    if event == '/jax/core/compile/backend_compile_duration':
      events.append((threading.current_thread().name, fun_name))

  jax.monitoring.register_event_duration_secs_listener(on_event)
  yield events
  jax.monitoring.unregister_event_duration_listener(on_event)


def _compiled_ahead(workdir):
  return [
    (s['model'], s['station']) for s in spans_lib.read(str(workdir)) if s['what'] == 'compile'
  ]


@pytest.mark.slow
def test_late_candidates_compile_while_others_train(tmp_path, monkeypatch, compiles):
  devices = jax.devices()[:2]
  monkeypatch.setattr(jax, 'local_devices', lambda: devices)
  config = model_rings.config(_MODELS, **{'strategy.max_in_ring': 1, 'duration': '1 epochs'})
  train, at_first_step = runner_lib.Runner.train, []

  def slow(self, *arguments):
    # As long as it takes to compile for the next model at this station.
    model, station = divmod(len(at_first_step), 2)
    at_first_step.append(len(compiles))
    if model + 1 < len(_MODELS):
      _until(lambda: (model + 1, station) in _compiled_ahead(tmp_path))
    return train(self, *arguments)

  monkeypatch.setattr(runner_lib.Runner, 'train', slow)
  model_ring_run.run(config, str(tmp_path), cluster.Processes(config))
  steps = [where for where, name in compiles if name == 'jit(train_step)']
  first, later = steps[:2], steps[2:]
  assert sorted(first) == ['station 0', 'station 1']
  names = ['ahead of station 0_0', 'ahead of station 1_0']
  assert sorted(later) == sorted(2 * names)
  assert all(
    where.startswith('ahead')
    for where, name in compiles[at_first_step[0] :]
    if name == 'jit(eval_step)'
  )
  assert sorted(_compiled_ahead(tmp_path)) == [(1, 0), (1, 1), (2, 0), (2, 1)]
  model_rings.assert_same(tmp_path, config, (35, 35), (1,), laps=1)


@pytest.mark.slow
def test_a_compile_that_fails_ahead_ends_the_run(tmp_path, monkeypatch):
  devices = jax.devices()[:1]
  monkeypatch.setattr(jax, 'local_devices', lambda: devices)
  compile_one = runner_lib.Runner.compile

  def fails(self, *arguments, **keys):
    if threading.current_thread().name.startswith('ahead'):
      raise MemoryError('XLA has no room')
    return compile_one(self, *arguments, **keys)

  monkeypatch.setattr(runner_lib.Runner, 'compile', fails)
  config = model_rings.config(
    ('seed=1', 'seed=2'), **{'strategy.max_in_ring': 1, 'duration': '500 epochs'}
  )
  with pytest.raises(MemoryError, match='XLA has no room'):
    model_ring_run.run(config, str(tmp_path), cluster.Processes(config))
  names = [t.name for t in threading.enumerate()]
  assert not [name for name in names if name.startswith('ahead')]
