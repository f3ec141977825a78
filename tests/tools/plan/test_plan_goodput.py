"""Tests of plan --mtbf: its table, its numbers and its errors."""

import json
import math
import re

import pytest
from scipy import special

from anp_jax.tools.plan import __main__ as command
from tests import builders

# Batches so large that fewer nodes are slower.
_FLAGS = [
  '--config=configs/lenet.py',
  '--config.batch_size=786432',
  '--device=a100-80',
  '--link=ib-hdr200x8',
  '--nodes=1,2,3,4,6',
  '--devices_per_node=2',
  '--scaling=strong',
  '--examples=12000000',
  '--classes=10',
  '--mtbf=100',
]


def _points(capsys, *arguments):
  assert command.main([*_FLAGS, *arguments]) == 0
  *lines, last = capsys.readouterr().out.splitlines()
  return lines, json.loads(last)['points']


def test_goodput_follows_from_the_step_and_the_flags(capsys, priors_only):
  flags = ['--config.checkpoint.every=2 epochs', '--config.cluster.heartbeat_timeout=60']
  lines, points = _points(capsys, '--restart_seconds=300', *flags)
  heading = 'share of the images/s that is kept if a node fails every 100 h and is back after 1 h'
  table = lines[lines.index(heading) + 2 :]
  # 5 nodes have 10 devices, which do not divide the batch.
  after = [table[0].index('after a loss'), table[0].index('requeued')]
  assert [row[slice(*after)].split()[0] for row in table[1:6]] == ['0', '1', '2', '3', '4']
  for point in points:
    goodput, nodes = point['goodput'], point['nodes']
    assert f'{100 * goodput["elastic_daly"]:.1f} %' == ' '.join(table[1].split()[-2:])
    table.pop(1)
    mtbf = 100 * 3600 / nodes
    assert goodput['loss_period'] == pytest.approx(mtbf, rel=1e-4)
    # Two epochs have ceil(2 x 12,000,000 / 786,432) steps.
    period = 31 * 786432 / point['images_per_second']
    assert goodput['save_period'] == pytest.approx(period, rel=1e-4)
    cost = goodput['save']['cost']
    expected = period / (
      mtbf * math.exp((60 + 300) / mtbf) * (math.exp((period + cost) / mtbf) - 1)
    )
    assert goodput['requeued'] == pytest.approx(expected, rel=1e-3)
    # The derivative of the kept share is zero where exp(-(t + cost) / mtbf) = 1 - t / mtbf.
    best = mtbf * (1 + special.lambertw(-math.exp(-1 - cost / mtbf)).real)
    assert goodput['save']['period'] == pytest.approx(best, rel=0.005)
    assert 0 < goodput['elastic'] <= goodput['elastic_daly'] < 1
    assert goodput['requeued'] < goodput['requeued_daly'] < 1
  assert points[0]['goodput']['requeued'] == points[0]['goodput']['elastic_daly']
  (often,) = _points(capsys, '--nodes=1', '--mtbf=1e-5')[1]  # at least a step
  assert often['goodput']['save']['period'] * often['images_per_second'] == pytest.approx(786432)


# Where the best checkpoints of a requeued run cost an elastic one more than they save.
_RESNET = [
  '--config=configs/resnet_anp.py:modern',
  '--device=h100',
  '--nodes=4,8',
  '--config.batch_size=2048',
]


@pytest.mark.parametrize('config', [[], _RESNET])
@pytest.mark.parametrize('mtbf, every', [(2, '10 epochs'), (100, '10 steps'), (100, '1 epochs')])
def test_best_copies_keep_no_less_than_the_configs(capsys, priors_only, config, mtbf, every):
  _, points = _points(capsys, *config, f'--mtbf={mtbf}', f'--config.checkpoint.every={every}')
  for goodput in (point['goodput'] for point in points):
    assert goodput['requeued'] <= goodput['requeued_daly']
    assert goodput['elastic'] <= goodput['elastic_daly']


def test_a_strategy_that_does_not_go_on_in_place_is_requeued(capsys, priors_only):
  config = ['--config=configs/channel_split_cifar10.py', '--config.batch_size=1024']
  lines, (point,) = _points(capsys, *config, '--nodes=2', '--scaling=strong')
  start = next(i for i, line in enumerate(lines) if 'requeued' in line)
  head, row = (re.split(r'\s{2,}', lines[i].strip()) for i in (start, start + 1))
  in_place = {'mirror', 'best every', 'after a loss', 'elastic', 'elastic, Daly'}
  assert {name for name, cell in zip(head, row, strict=True) if cell == '-'} == in_place
  goodput = point['goodput']
  assert goodput['elastic'] is goodput['elastic_daly'] is goodput['mirror'] is None
  assert 0 < goodput['requeued'] < goodput['requeued_daly'] < 1


def test_bytes_that_a_host_copies(capsys, priors_only):
  """A core copies 10 GB/s, reading and writing; a save holds 2.25 GB/s up."""
  _, points = _points(capsys, '--strategies=sync,fsdp', '--nodes=4')
  replicated, sharded = (p['goodput'] for p in points)
  # Caffe's LeNet of 10 classes, and a momentum; the optimizer also counts its steps.
  parameters = 25 * 20 + 20 + 25 * 20 * 50 + 50 + 800 * 500 + 500 + 500 * 10 + 10
  assert replicated['save']['cost'] == pytest.approx(2 * 4 * parameters / 2.25e9, rel=0.02)
  assert replicated['mirror']['cost'] == pytest.approx(0.45 * replicated['save']['cost'], rel=1e-3)
  # Each of 8 devices has an eighth; two are on a host, which keeps a neighbour's as well.
  assert sharded['save']['cost'] == pytest.approx(replicated['save']['cost'] / 4, rel=1e-3)
  assert sharded['mirror']['cost'] == pytest.approx(replicated['mirror']['cost'] / 2, rel=1e-3)


def test_flags_of_what_follows_a_loss(capsys, priors_only):
  def shares(*arguments):
    (point,) = _points(capsys, '--nodes=6', *arguments)[1]
    return point['goodput']['requeued'], point['goodput']['elastic']

  requeued, elastic = shares()
  assert shares('--restart_seconds=600') < (requeued, elastic)
  # Longer pauses cost the others alone, and so do longer repairs.
  for flag in ('--elastic_seconds=600', '--repair=10'):
    again, slower = shares(flag)
    assert again == requeued and slower < elastic
  # Between two copies half of the steps are lost on average: exponential losses.
  step = 786432 / _points(capsys, '--nodes=6')[1][0]['images_per_second']
  cost = _points(capsys, '--nodes=6')[1][0]['goodput']['mirror']['cost']
  every = [f'--config.cluster.mirror_every={n}' for n in (500, 5000)]
  often, seldom = (shares('--repair=0', flag)[1] for flag in every)
  losses = 6 / (100 * 3600)
  shares_kept = [n * step / math.expm1((n * step + cost) * losses) for n in (500, 5000)]
  assert seldom / often == pytest.approx(shares_kept[1] / shares_kept[0], rel=1e-3)
  # A run of seconds loses no node.
  again, faster = shares('--repair=0')
  assert again == requeued and elastic < faster


@pytest.mark.parametrize(
  'arguments, words',
  [
    (['--mtbf=-1'], '--mtbf=-1.0: expected a number above 0'),
    (['--mtbf=nan'], '--mtbf=nan: expected a number above 0'),
    (['--mtbf=1e300'], '--mtbf=1e+300: expected hours from 1e-6 to 1e9'),
    (['--repair=1e-9'], '--repair=1e-09: expected 0, or hours from 1e-6 to 1e9'),
    (['--restart_seconds=inf'], '--restart_seconds=inf: expected a number from 0'),
    (['--elastic_seconds=-3'], '--elastic_seconds=-3.0: expected a number from 0'),
    (
      ['--strategies=sync,parameter_server:async'],
      "--mtbf=100 with the strategy 'parameter_server:async': expected strategies whose",
    ),
    (
      ['--target_hours=2', '--budget_devices=16'],
      '--mtbf=100.0: expected without --target_hours: ',
    ),
  ],
)
def test_bad_input_is_one_line(capsys, priors_only, arguments, words):
  assert command.main([*_FLAGS, *arguments]) == 2
  assert words in builders.error_line(capsys)
