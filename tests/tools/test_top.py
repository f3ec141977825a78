"""What top shows of a coordinator's answer, which may be a stranger's."""

import io

import pytest
import rich.console

from anp_jax.tools import top
from tests import builders

_ROW = ['rank 0 on node0', 'step', 7, 0.1, 0.2, 1.5, 98.0, 0.0, 0.5, 0.25]


def _shown(rows, verdict):
  stream = io.StringIO()
  console = rich.console.Console(file=stream, force_terminal=True, width=200)
  console.print(top._view({'rows': rows, 'verdict': verdict}))
  return stream.getvalue()


def test_nobody_obeys_a_name():
  text = _shown([['[red]a[/x]\x1b[31m', *_ROW[1:]], _ROW[:5]], '[/x]\x1b]0;owned\x07')
  assert r'[red]a[/x]\x1b[31m' in text and r'[/x]\x1b]0;owned\x07' in text
  assert '\x1b]' not in text and '\x1b[31m' not in text
  assert text.splitlines()[2].split() == 'rank 0 on node0 7 step 0% 0.00 0.00'.split()


@pytest.mark.parametrize('index', range(len(_ROW)))
@pytest.mark.parametrize('value', [None, 'x', {}, 10**400], ids=['null', 'text', 'object', 'huge'])
def test_an_odd_row_is_shown_or_refused(index, value):
  row = [*_ROW[:index], value, *_ROW[index + 1 :]]
  try:
    assert len(_shown([row], '').splitlines()) == 3
  except ValueError as e:
    assert str(e) == 'the coordinator answered no rows of processes'


@pytest.mark.parametrize('answer', [None, [], {}, {'rows': 5}, {'rows': [[1]], 'verdict': ''}])
def test_an_odd_answer_is_refused(answer):
  builders.assert_refused('answered no rows', top._view, answer)
