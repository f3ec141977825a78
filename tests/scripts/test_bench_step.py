"""The benchmark of the training step: its peers, its protocol, and a run of it."""

import dataclasses
import importlib.util
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.system import onednn
from scripts.bench import _cases, _contest, _flax_networks, _step_worker, _torch_peers, step
from tests import launching, timm_peer

H100 = 'NVIDIA H100 80GB HBM3'
# As published: torchvision's ResNet-50, EfficientNet-B0 and ConvNeXt-T; Caffe's examples.
# The demo's: torchvision's ResNet-18 has 11,689,512, 513,000 in a
# classifier of 1,000 classes; one for 60 has 30,780.
PARAMETERS = {
  'resnet50_224': 25_557_032,
  'efficientnet_b0_gpu': 5_288_548,
  'convnext_tiny_gpu': 28_589_128,
  'resnet18_demo': 11_689_512 - 513_000 + 30_780,
  'lenet': 431_080 + 2 * 20 * 5 * 5,  # published for gray images
  'cifar10_full': 89_578,
}


def test_median_lowest_and_quartiles_of_the_rounds():
  over = _contest.over([1, 1, 2, 1, 1], [4, 1, 4, 3, 5])
  # The rounds' ratios, sorted: 1, 2, 3, 4, 5.
  # The fastest rounds took 1 and 1, the second contestant's was the second.
  assert over == (3, 1, (2, 4), 1)
  assert _contest.over([2], [3]) == (1.5, 1.5, (1.5, 1.5), 1.5)
  row = ' '.join(_contest.row('x', over, 3.5))
  assert row == 'x 3.00 1.00 2.00-4.00 1.00 >= 3.5 missed'
  assert _contest.row('x', 1.0, -1.15) == ('x', '1.00', '', '', '', '<= 1.15', 'met')


def test_each_round_has_all_in_an_order_by_chance():
  orders = list(_contest.rounds('abcd', 60))
  assert orders == list(_contest.rounds('abcd', 60))
  assert {''.join(sorted(order)) for order in orders} == {'abcd'}
  # Each of the 24 orders is missed with a chance of (23 / 24)^60 = 8 %, and
  # half of them with next to none.
  assert len({''.join(order) for order in orders}) > 12
  assert {order[0] for order in orders} == set('abcd')


def test_a_step_has_six_operations_for_each_multiplication():
  """4.09e9 multiplications an image at 224 px, of 989.5 TFLOP/s."""
  case = _cases.CASES['resnet50_gpu']
  share = 1280 * 6 * 4.09e9 / 989.5e12
  assert step.mfu(case, 1280, H100) == pytest.approx(share)
  half = dataclasses.replace(case, side=112)
  assert step.mfu(half, 1280, H100) == pytest.approx(share / 4)
  assert step.mfu(case, 1, 'a card of next year') == step.mfu(_cases.CASES['lenet'], 1, H100) == 0


def test_our_flags_are_ours_and_the_allocator_is_everyones(monkeypatch):
  for name in ('XLA_FLAGS', 'GLIBC_TUNABLES'):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  monkeypatch.setattr(_contest.xla_flags, '_devices_are_open', lambda: False)
  monkeypatch.setattr(_contest.xla_flags, '_read', lambda path: '[madvise]')
  monkeypatch.setattr(_contest.xla_flags, '_can_restart', lambda: True)
  ours, peer = (_contest.environment(is_ours, extra={'A': '1'}) for is_ours in (True, False))
  assert 'xla_cpu' in ours.pop('XLA_FLAGS')
  assert ours == peer
  assert ours['GLIBC_TUNABLES'] == 'glibc.malloc.hugetlb=1' and ours['A'] == '1'


def test_operations_are_those_of_the_device_where_there_is_one():
  def event(name, **stats):
    return types.SimpleNamespace(name=name, stats=list(stats.items()))

  def plane(name, *events):
    line = types.SimpleNamespace(events=events)
    return types.SimpleNamespace(name=name, lines=[line])

  host = plane('/host:CPU', event('fusion.1', hlo_op='fusion.1'), event('wait', id=1))
  device = plane('/device:GPU:0', event('gemm', hlo_op='custom-call'))

  def names(*planes):
    data = types.SimpleNamespace(planes=planes)
    return [e.name for e in _step_worker.operations(data)]

  assert names(host) == ['fusion.1']
  assert names(host, device) == ['gemm']


@pytest.mark.parametrize('name', PARAMETERS)
def test_peers_have_the_published_parameters(name):
  case = _cases.CASES[name]
  images = jax.ShapeDtypeStruct((1, case.side, case.side, 3), jnp.float32)
  init = _flax_networks.network(case).init
  variables = jax.eval_shape(lambda x: init(jax.random.key(0), x, True), images)
  sizes = [np.prod(x.shape) for x in jax.tree.leaves(variables['params'])]
  assert sum(sizes) == PARAMETERS[name]
  timm_peer.require()
  import torch

  with torch.device('meta'):
    net = _torch_peers.network(case)
    images = torch.zeros(2, 3, case.side, case.side)
    assert net(images).shape == (2, case.classes)
  assert sum(p.numel() for p in net.parameters()) == PARAMETERS[name]


def test_an_unknown_case_is_answered_with_those_there_are():
  with pytest.raises(SystemExit, match='--cases=lenet50: expected some of resnet50_64, '):
    step._chosen('--cases', 'lenet50', _cases.CASES)


@pytest.mark.soak
def test_the_last_line_is_of_finite_ratios(tmp_path):
  flags = ['--cases=tiny', '--peers=xla,flax,torch_eager', '--rounds=2', '--steps=3']
  result = launching.python('-m', 'scripts.bench.step', *flags, f'--profile={tmp_path}', status=0)
  ratios = json.loads(result.stdout.splitlines()[-1])
  expected = {'tiny_over_flax', 'tiny_compile_over_step', 'tiny_ours_first_step_seconds'}
  if onednn.find():
    expected.add('tiny_over_xla')
  if importlib.util.find_spec('torch'):
    expected |= {'tiny_over_torch', 'tiny_memory_over_torch', 'tiny_stepping_memory_over_torch'}
  assert expected <= set(ratios)
  assert all(math.isfinite(r) and r > 0 for r in ratios.values())
  # Ten operations of the profile, most expensive first, by their share.
  lines = result.stdout.splitlines()
  at = next(i for i, line in enumerate(lines) if 'top operations' in line)
  shares = [float(line.split('%')[0]) for line in lines[at + 1 : at + 11]]
  assert shares == sorted(shares, reverse=True)
  assert 0 < sum(shares) <= 100.5
