"""Tests of portability: its table, and what it refuses."""

import json

import pytest

from anp_jax.parallel import mesh as mesh_lib
from anp_jax.tools.portability import __main__ as command, portability_table

P = mesh_lib.P


def _result(dtype='float32', overlapping=0):
  row = {
    'kind': 'all-reduce',
    'dtype': dtype,
    'conditional': False,
    'operations': 3,
    'elements': 10**6,
    'bytes': 4 * 10**6,
    'asynchronous': overlapping,
    'overlapping_compute': overlapping,
    'overlapping_products': 0,
  }
  memory = dict.fromkeys(('arguments', 'temporary', 'together'), 10**7)
  part = {
    'images': 8,
    'flops': 2e9,
    'asked': [row],
    'compiled': [row],
    'memory': memory,
    'seconds': 1.0,
  }
  return {
    'device': 'thing',
    'devices': 8,
    'named_dtype': 'float32',
    'eval': part,
    'train': part | {'gradients_asked': [dtype], 'gradients_compiled': [dtype]},
  }


def test_what_differs_is_marked():
  actual = {'a': _result(), 'b': _result('bfloat16', overlapping=3 * 10**6)}
  rows = {name: cells for name, *cells in portability_table.rows(actual)}
  assert rows['training: gradients compiled'] == ['float32', 'bfloat16']
  assert rows['training: GFLOP a device'] == ['2.0', '2.0']
  assert rows['training: GFLOP an image'] == ['2.00', '2.00']
  sent = rows['training: compiled all-reduce float32']
  assert sent == ['3 x, 4.0 MB', '-']
  overlapping = rows['training: MB sent during compute']
  assert overlapping == ['synchronous', '3.0 of 4.0']
  lines = portability_table.lines('title', portability_table.rows(actual), list(actual))
  marked = [line.split('  ')[1] for line in lines if line.endswith('differs')]
  assert marked.count('gradients compiled') == 1
  assert 'GFLOP a device' not in marked


def test_what_does_not_compile_is_said_and_the_others_shown(monkeypatch, capsys):
  part = _result()
  part['train'] = {'images': 8, 'flops': 1e9, 'asked': [], 'why_not': 'out of memory'}
  answers = {'cpu:1': _result(), 'cpu:2': {'why_not': 'ended'}, 'cpu:4': part}
  monkeypatch.setattr(command, '_in_a_process', lambda t, *_: answers[t.text])
  arguments = [f'--target={name}' for name in answers]
  arguments.append('--config=configs/resnet_anp.py:tiny')
  assert command.main(arguments) == 1
  out, err = capsys.readouterr()
  assert err.splitlines() == ['error: cpu:2: ended', 'error: cpu:4 train: out of memory']
  printed = [line.split() for line in out.splitlines()]
  assert ['cpu:1', 'cpu:4'] in printed
  assert ['compiled', 'yes', 'no', 'differs'] in printed
  assert json.loads(out.splitlines()[-1])['targets'] == answers
  assert command.main([arguments[0], arguments[-1]]) == 0


@pytest.mark.parametrize(
  'named, actual, good',
  [
    ('float32', 'float32', True),
    ('float32', 'bfloat16', False),
    ('float32', None, False),
    ('bfloat16', 'bfloat16', True),
    ('bfloat16', 'float32', True),
  ],
)
def test_gradients_in_a_narrower_dtype_than_named_are_refused(
  named, actual, good, monkeypatch, capsys
):
  answer = _result(actual or 'float32') | {'named_dtype': named}
  if actual is None:
    answer['train']['gradients_compiled'] = []
  monkeypatch.setattr(command, '_in_a_process', lambda *_: answer)
  status = command.main(['--target=cpu:1', '--config=configs/resnet_anp.py:tiny'])
  assert status == (0 if good else 1)
  err = capsys.readouterr().err
  words = 'gradients are summed in bfloat16, but config.strategy.reduce_dtype='
  if actual is None:
    words = 'the compiled program has no sum of gradients in float32'
  assert err.startswith('' if good else f'error: cpu:1 train: {words}')
  assert err.count('\n') == (not good)
