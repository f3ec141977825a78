"""What top shows of a coordinator's answer, which may be a stranger's."""

import io

import pytest
import rich.console
import rich.text

from anp_jax.tools import top
from tests import builders

_ROW = [
  'rank 0 on node0',
  'step',
  7,
  0.1,
  0.2,
  1.5,
  98.0,
  [4.0, 9.0, 2.0],
  0.5,
  0.25,
  0.0,
  ['input'],
]


def _shown(rows, verdict, *losses, width=200):
  stream = io.StringIO()
  console = rich.console.Console(file=stream, force_terminal=True, width=width)
  console.print(top._view({'rows': rows, 'verdict': verdict, 'losses': losses}))
  return stream.getvalue()


def test_nobody_obeys_a_name():
  text = _shown([['[red]a[/x]\x1b[31m', *_ROW[1:]], _ROW[:5]], '[/x]\x1b]0;owned\x07')
  assert r'[red]a[/x]\x1b[31m' in text and r'[/x]\x1b]0;owned\x07' in text
  assert '\x1b]' not in text and '\x1b[31m' not in text
  assert text.splitlines()[2].split() == 'rank 0 on node0 7 step 0.00 0.00'.split()


def test_a_terminal_of_80_characters_has_a_line_for_each_process():
  rows = [[f'rank {i} on node1', 'starting', 1234, 99.4, *_ROW[4:]] for i in (2, 3)]
  assert len(_shown(rows, 'nobody', width=80).splitlines()) == 4


def test_each_cell_has_its_column_and_losses_come_before_the_verdict():
  late = ['rank 1 on node1', *_ROW[1:5], 11.5, 88.0, *_ROW[7:]]
  lines = _shown([_ROW, late], 'nobody', 'a', 'b').splitlines()
  text = 'process step does cores want input rest save eval late ms'
  assert [rich.text.Text.from_ansi(line).plain.split() for line in lines] == [
    text.split(),
    'rank 0 on node0 7 step 0.50 0.75 1.5 98.0 9.0 4.0 0.0'.split(),
    'rank 1 on node1 7 step 0.50 0.75 11.5 88.0 9.0 4.0 10.0'.split(),
    *(['a'], ['b'], ['nobody']),
  ]


@pytest.mark.parametrize('index', range(len(_ROW)))
@pytest.mark.parametrize('value', [None, 'x', {}, 10**400], ids=['null', 'text', 'object', 'huge'])
def test_an_odd_row_is_shown_or_refused(index, value):
  row = [*_ROW[:index], value, *_ROW[index + 1 :]]
  try:
    assert len(_shown([row], '').splitlines()) == 3
  except ValueError as e:
    assert str(e) == 'the coordinator answered no rows of processes'


@pytest.mark.parametrize(
  'answer', [None, [], {}, {'rows': 5}, {'rows': [[1]], 'verdict': '', 'losses': []}]
)
def test_an_odd_answer_is_refused(answer):
  builders.assert_refused('answered no rows', top._view, answer)
