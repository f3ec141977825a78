"""The processes of a run: who may join, who is missing, who is late."""

import time

import pytest

from anp_jax.cluster import members
from tests import builders, coordinating


def _members(*indices, count=3, **values):
  """A run that these processes have joined."""
  return coordinating.members_of(indices, count, **values)


@pytest.mark.parametrize(
  'phases, late',
  [
    ('step 9, input 9, step 9', 'rank 1 on node1 is late (input 9)'),
    ('step 9, step 8, step 9', 'rank 1 on node1 is late (step 8)'),
    ('input 9, saving 8, saving 8', 'rank 1 on node1, rank 2 on node2 are late (saving 8)'),
    ('saving 8, evaluating 8, saving 8', 'rank 1 on node1 is late (evaluating 8)'),
    ('leaving 9, saving 9, leaving 9', 'rank 1 on node1 is late (saving 9)'),
    ('step 1, compiling 0, step 1', 'rank 1 on node1 is late (compiling)'),
    ('joining 0, loading 0, opening 0', 'rank 1 on node1 is late (loading)'),
    ('starting 0, comparing 0, starting 0', 'rank 1 on node1 is late (comparing)'),
    ('loading 0, , loading 0', 'rank 1 on node1 is late (starting)'),
    ('step 9, step 9, step 9', 'all ranks are equally late (step 9)'),
    (
      'compiling 0, step 0, planning 0',
      'rank 0 on node0, rank 2 on node2 are late (compiling, planning)',
    ),
    ('step 9, , step 9', 'rank 1 on node1 is late (starting)'),
  ],
)
def test_who_is_late(phases, late):
  run = _members(2, 1, 0)
  for index, text in enumerate(phases.split(', ')):
    if text:
      phase, step = text.split()
      run[index].state = {'phase': phase, 'step': int(step)}
  assert run.late(run[0]) == late


def test_who_makes_steps_of_its_own_is_late_when_it_has_stalled():
  """The stations of a ring train at different steps of their models."""
  run = _members(0, 1, 2, steps_together=False)
  for index, step in enumerate((49, 52, 149)):
    run[index].state = {'phase': 'step', 'step': step}
  assert run.late(run[1]) == 'rank 1 on node1 is late (step 52)' and run.late_ranks(run[1]) == [1]
  for index, phase in enumerate(('comparing', 'comparing', 'loading')):
    run[index].state = {'phase': phase, 'step': 0}
  assert run.late(run[1]) == 'rank 2 on node2 is late (loading)'


def test_who_is_missing():
  run = _members(0, 2)
  assert run.missing(run) == 'rank 1 has' and run.presence() == '2 of 3 are here'
  assert run.missing([1]) == 'rank 0 on node0, rank 2 on node2 have'
  assert members.listed([f'rank {i}' for i in range(63)]).endswith('rank 7 and 55 more')


@pytest.mark.parametrize(
  'indices, optional, is_enough',
  [((0, 1), [2], True), ((0, 1), [1], False), ((0,), [1, 2], True), ((1, 2), [0], False)],
)
def test_whether_those_that_are_here_are_enough(indices, optional, is_enough):
  run = _members(*indices, optional=optional)
  assert run.are_enough() == is_enough and not run.are_complete()
  assert _members(0, 1, 2).are_complete()


def test_a_run_begins_once_and_knows_the_place_of_each():
  gpus = {'host': 'a', 'platform': 'gpu', 'gpus': ['x', 'y'], 'optional': [1]}
  run = _members(0, 1, count=2, **gpus)
  assert not run.have_begun and not run.can_go_without(1)
  run.begin(99, least=1)
  assert run.have_begun
  assert run.can_go_without(1) and not run.can_go_without(0)
  start = {
    'port': 99,
    'hosts': ['a', 'a'],
    'ranks': [0, 1],
    'rank': 1,
    'addresses': {},
    'sizes': (),
    'number': 0,
    'lost': {},
    'could_grow': False,
  }
  assert [run.start_of(run[i])['devices'] for i in (0, 1)] == [[0], [1]]
  sent = run.start_of(run[1])
  assert abs(sent.pop('started_at') - time.time()) < 60
  assert sent == {**start, 'devices': [1]}


@pytest.mark.parametrize(
  'gpus, first, late',
  [
    ('ab', [0], {1: ('ab', [1]), 2: ('cde', [0]), 3: ('cde', [1])}),
    ('a', [0], {1: ('b', [0]), 2: ('c', [0])}),  # each sees its own
    ('ab', [0], {1: ('ab', [1]), 2: ('ab', []), 3: ('cd', [0])}),
    ('', None, {1: ('ab', [0, 1]), 2: ('ab', []), 3: ('', None)}),  # a server on its CPU
  ],
)
def test_processes_that_come_late_divide_the_gpus_that_are_free(gpus, first, late):
  present = (0, 4) if gpus == 'ab' else (0,)  # of one host
  run = _members(
    *present, count=5, optional=[1, 2, 3, 4], platform='gpu', gpus=list(gpus), host='a'
  )
  run.begin(99, least=1)
  run.pop(4, None)  # it goes
  assert run.start_of(run[0])['devices'] == first
  for index, (visible, want) in [*late.items(), *late.items()]:  # it may come again
    info = coordinating.info(index, 5, {'platform': 'gpu', 'gpus': list(visible)})
    assert not run.refusal(info)
    run.take_in(members.Member(info, writer=None, last_heard=0.0))
    assert run.start_of(run[index])['devices'] == want


def test_processes_that_cannot_share_gpus_do_not_begin():
  run = _members(0, 1, count=2, platform='gpu', gpus=['a'], host='node0')
  words = '^rank 0 on node0 and 1 more processes there all see the same 1 GPUs'
  builders.assert_refused(words, run.begin, 99, least=1)
  assert not run.have_begun


@pytest.mark.parametrize(
  'info, text',
  [
    ({}, ''),
    ({'token': 'jobs'}, 'rank 1 on node1 belongs to another job than rank 0'),
    ({'token': ''}, 'rank 1 on node1 belongs to another job than rank 0'),
    ({'count': 4}, 'rank 1 on node1 expects 4 processes, rank 0 3'),
    ({'index': 7}, 'rank 7 on node1 is none of 3'),
    ({'index': 2}, 'rank 2 came twice: from node2 and from node1'),
    ({'optional': [0, 2], 'versions': {'jax': '2'}}, ''),  # compared when all are here
  ],
)
def test_who_may_join_before_the_run_begins(info, text):
  assert _members(0, 2).refusal(coordinating.info(1, 3, info)) == text


@pytest.mark.parametrize(
  'info, text',
  [
    ({}, ''),
    ({'host': 'node7', 'optional': []}, ''),  # rank 0's list counts
    ({'index': 2, 'optional': [2]}, 'rank 2 on node1 found a run that has begun already'),
    ({'token': 'jobs'}, 'rank 1 on node1 belongs to another job than rank 0'),
    ({'versions': {'jax': '2'}}, 'rank 1 on node1 has jax 2, but rank 0 on node0 has 1'),
  ],
)
def test_who_may_join_a_run_that_has_begun(info, text):
  run = _members(0, 1, 2, optional=[1])
  run.begin(99, least=1)
  refusal = run.refusal(coordinating.info(1, 3, info))
  assert refusal.startswith(text) and bool(refusal) == bool(text)
