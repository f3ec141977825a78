"""Tests of the page of results: it is what the script renders from the tables."""

import datetime
import pathlib
import re

import pytest

from scripts import render_results

_ROOT = pathlib.Path(__file__).parents[2]
_TABLES = sorted((_ROOT / 'results').glob('*.csv'))


def _row(**changed):
  row = dict.fromkeys(render_results.COLUMNS, '')
  return {**row, 'question': 'speed', 'date': '2026-01-02', 'unit': 'x', **changed}


def test_the_page_is_what_the_script_renders():
  assert (_ROOT / 'docs/results.md').read_text() == render_results.render(_ROOT / 'results')


@pytest.mark.parametrize('path', _TABLES, ids=lambda path: path.stem)
def test_every_row_has_a_figure_a_date_and_a_goal_that_is_a_bound(path):
  for row in render_results.read(path):
    datetime.date.fromisoformat(row['date'])
    assert row['question'] and row['machine'] and row['unit'], row
    assert row['median'] or (row['low'] and row['high']), row
    assert '|' not in ''.join(row.values()), row
    sign, _, bound = (row['goal'] or '>= 0').partition(' ')
    assert sign in ('>=', '<=') and float(bound) >= 0, row
    if row['low'] and row['high']:
      assert float(row['low']) <= float(row['median'] or row['low']) <= float(row['high']), row


def _flag(command, name):
  """The text of a flag of a command; '' without it."""
  match = re.search(rf'--{name}="?([^"\s]*)', command)
  return match[1] if match else ''


@pytest.mark.parametrize('name', ['accuracy', 'strategies'])
def test_an_accuracy_on_cifar10_says_that_it_is_of_copies(name):
  rows = render_results.read(_ROOT / f'results/{name}.csv')
  rows = [r for r in rows if 'CIFAR-10' in r['question'] and 'digits' not in r['question']]
  assert rows and all('JPEG' in row['question'] + row['note'] for row in rows)


def test_the_command_of_a_strategy_trains_it():
  for row in render_results.read(_ROOT / 'results/strategies.csv'):
    question, command, note = row['question'], row['command'], row['note']
    strategies = _flag(command, 'strategies')
    if not strategies or '.toml' in strategies or 'is not kept' in note:
      continue  # else the command is of this row and few others
    for word in re.findall(r'\bsync\b|invariant|local_sgd|dana|synchronous|smega2', question):
      assert re.search(rf'\b{word}\b', command), row
    for count in re.findall(r'(\d+) simulated', question):
      assert count in _flag(command, 'workers').split(','), row
    for period in re.findall(r'period (\d+)', question):
      assert period in re.split(r'\W', _flag(command, '[a-z.=]*period')), row
    if 'diverged' not in note:
      assert len(_flag(command, 'seeds').split(',')) == int(row['n']), row


def test_a_question_shows_its_newest_row():
  rows = [_row(median='2', date='2026-01-03'), _row(median='1'), _row(median='3', question='size')]
  assert [row['median'] for row in render_results.newest(rows)] == ['2', '3']


@pytest.mark.parametrize(
  'row, figure, verdict',
  [
    (_row(median='1.5', goal='>= 1.5'), '1.5 x', '>= 1.5: met'),
    (_row(median='1.5', low='1', high='2', goal='<= 1.4'), '1.5 (1 to 2) x', '<= 1.4: **missed**'),
    (_row(median='1.5', low='1'), '1.5 (lowest 1) x', ''),
    (_row(low='1', high='2', goal='<= 1.4'), '1 to 2 x', '<= 1.4: **missed**'),
  ],
)
def test_a_figure_and_its_goal(row, figure, verdict):
  assert render_results.figure(row) == figure
  assert render_results.verdict(row) == verdict


@pytest.mark.parametrize(
  'text, message',
  [
    ('question,goal\n', 'expected'),
    (','.join(render_results.COLUMNS) + '\nspeed,,2026-01-01,m,v,c,1,fast,,,x,\n', "'fast'"),
  ],
)
def test_a_table_that_does_not_parse_is_refused(tmp_path, text, message):
  path = tmp_path / 'speed.csv'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    render_results.read(path)
