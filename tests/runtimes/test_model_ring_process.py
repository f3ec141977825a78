"""Tests of what a process of a ring reports of its stations."""

import types
from unittest import mock

from anp_jax import cluster
from anp_jax.runtimes.model_ring import messages, model_ring_run


def test_a_station_that_hangs_sends_no_heartbeat():
  """Else the watchdog would take the polls of the main thread for progress."""
  process = object.__new__(model_ring_run._RingProcess)
  process._processes, process._latest = mock.Mock(), ('', 0)
  stations = [types.SimpleNamespace(phase='waiting', progress=n) for n in (3, 4)]
  process._workers = stations

  def beats(phase, progress):
    stations[0].phase, stations[0].progress = phase, progress
    process._processes.reset_mock()
    for _ in range(3):
      process._heartbeat()
    return [call.args for call in process._processes.heartbeat.call_args_list]

  assert beats('waiting', 3) == [('waiting', 7)] * 3  # for another process
  assert beats('step', 3) == [('step', 7)]
  assert beats('step', 4) == [('step', 8)]
  assert beats('evaluating', 4) == [('evaluating', 8)]
  stations[1].phase = 'step'
  assert beats('evaluating', 4) == []


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
