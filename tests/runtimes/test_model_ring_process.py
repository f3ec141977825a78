"""Tests of what a process of a ring reports of its stations."""

import contextlib
import types
from unittest import mock

from anp_jax import cluster
from anp_jax.runtimes.model_ring import messages, model_ring_run, ring_worker


def test_a_station_that_hangs_sends_no_heartbeat():
  """Else the watchdog would take the polls of the main thread for progress."""
  process = object.__new__(model_ring_run._RingProcess)
  process._processes, process._latest = mock.Mock(), ('', 0)
  stations = [types.SimpleNamespace(phase='waiting', progress=n, step=400) for n in (3, 4)]
  process._workers = stations

  def beats(phase, progress):
    stations[0].phase, stations[0].progress = phase, progress
    stations[0].step = 400 + progress
    process._processes.reset_mock()
    for _ in range(3):
      process._heartbeat()
    return [call.args for call in process._processes.heartbeat.call_args_list]

  assert beats('waiting', 3) == [('waiting', 403)] * 3  # for another process
  assert beats('step', 3) == [('step', 403)]
  assert beats('step', 4) == [('step', 404)]
  assert beats('evaluating', 4) == [('evaluating', 404)]
  stations[1].phase = 'step'
  assert beats('evaluating', 4) == []


def test_a_stations_step_is_its_models():
  """Also before the first step that it makes of a model, and after the last."""
  runner, steps = mock.Mock(), []
  segment = types.SimpleNamespace(station=0, lap=8, first=400, steps=2)
  runner.schedule.at.return_value, runner.is_save_due.return_value = segment, False
  runner.place.side_effect = lambda state: steps.append(worker.step)

  def train(*_):
    for step, state in (401, None), (402, 'state'):
      yield types.SimpleNamespace(step=step), state
      steps.append(worker.step)

  runner.train = train
  runners = mock.MagicMock(__getitem__=lambda *_: runner)
  spans = types.SimpleNamespace(record=lambda *_: contextlib.nullcontext({}))
  worker = ring_worker.RingWorker(runners, mock.Mock(), mock.Mock(), spans, mock.Mock())
  worker._number, worker._request_score = 0, mock.Mock()
  worker._train(messages.ModelMessage(1, 400, 'state'))
  assert steps == [400, 401, 402] and worker.progress == 2


def test_a_save_that_fails_is_no_lost_process():
  """The run would be started again, and fail again."""
  sender = object.__new__(messages.Sender)
  sender._store, sender.events = mock.Mock(), mock.Mock()
  for error, kind in (
    (cluster.RunFailedError('no space'), cluster.RunFailedError),
    (OSError(104, 'Connection reset'), cluster.PeerLostError),
  ):
    sender._store.let_go.side_effect = error
    sender._send_arrays(1, 2, messages.ModelMessage(0))
    (event,) = sender.events.put.call_args.args
    assert type(event) is kind
