"""Tests of plan: seconds and memory of strategies, against closed forms."""

import dataclasses

import pytest

from anp_jax.config import command_line, strategy as strategy_lib
from anp_jax.costs import collectives, device_step, hardware
from anp_jax.runtimes.parameter_server import server_cost
from anp_jax.tools.plan import plan_memory, points, workload
from tests import plan_settings

_MODERN = 'configs/resnet_anp.py:modern'
_BYTES = 4 * (25557032 + 53120)  # of gradients and statistics


@pytest.fixture(scope='module')
def cost():
  config = command_line.load(_MODERN, {'data.source': 'synthetic'})
  return workload.count(config, 1281167, 1000)


_FIELDS = ('link', 'efficiency', 'jitter', 'measured', 'slow', 'sharing', 'handling')


def _setting(cost, nodes, devices=1, **keys):
  """Nodes with these fields of a setting, the others are keys of the config."""
  fields = {name: keys.pop(name) for name in _FIELDS if name in keys}
  keys = {k.replace('__', '.'): v for k, v in keys.items()}
  config = command_line.load(_MODERN, {'data.source': 'synthetic'} | keys)
  return plan_settings.setting(config, cost, nodes, devices, **fields)


def _step(cost, nodes, images=32, **keys):
  setting = _setting(cost, nodes, **keys)
  return strategy_lib.find(setting.config).predicted_step(setting, images)


# Its products take long, and all but the last sum is hidden.
_SLOW = dataclasses.replace(plan_settings.PERFECT, product=1e-4, overlap=1.0)
_INVARIANT = {'strategy__name': 'invariant', 'strategy__logical_shards': '12'}
_FSDP = {'sharding': "(('.*', 'fsdp'),)"}
_LOCAL = {'strategy__name': 'local_sgd', 'strategy__groups': '2', 'strategy__period': '10'}


@pytest.mark.parametrize(
  'nodes, images, keys, sent',
  [
    # 4 devices in a ring: 2 x 3/4 of the bytes, nothing hidden.
    (4, 32, {}, 1.5 * _BYTES),
    # Three shards a device are three sums: two more are scattered. Four are one.
    (4, 33, _INVARIANT, (1.5 + 2 * 0.75) * _BYTES),
    (3, 44, _INVARIANT, 4 / 3 * _BYTES),
    (4, 32, {'strategy__reduce_dtype': 'bfloat16'}, 1.5 * (2 * 25557032 + 4 * 53120)),
    # 3/4 of the weights and 3/4 of the gradients: half of a sum each.
    (4, 32, _FSDP, 0.75 * (4 * 25557032 + _BYTES)),
    # Two groups of one device: a sum of two, once in ten steps.
    (2, 32, _LOCAL, _BYTES / 10),
  ],
)
def test_what_a_strategy_sends(cost, nodes, images, keys, sent):
  step = _step(cost, nodes, images, **keys)
  assert step.communication == pytest.approx(sent / 1e9, rel=1e-3)


def test_sync_computes_its_images(cost):
  step = _step(cost, 4)
  assert step.compute == pytest.approx(32 * cost.image_flops / 989.5e12, rel=1e-3)
  assert step.images == 128


def test_a_long_backward_pass_hides_all_but_the_last_bucket(cost):
  step = _step(cost, 4, efficiency=_SLOW)
  *_, (over, last) = device_step.buckets(cost, 4, 25)
  assert over == 1 and last < 5e6
  assert step.communication == pytest.approx(1.5 * last / 1e9, rel=1e-3)


def test_channel_split_has_the_ideal_of_the_paper(cost):
  keys = {'strategy__name': 'channel_split', 'mesh__data': '1', 'mesh__model': '-1'}
  step = _step(cost, 4, link=plan_settings.FAST, **keys)
  alone = _setting(cost, 1).alone(32).images
  split = sum(x.flops for x in cost.layers if x.is_convolution)
  share = split / sum(x.flops for x in cost.layers)
  assert alone / step.compute == pytest.approx(1 / ((1 - share) + share / 4))


def test_memory_is_near_that_of_the_compiled_program(cost):
  # XLA's count for an H200, 32 images in bfloat16: 2,007 MB (docs/log.md).
  count = plan_memory.count(_setting(cost, 16, 4), 32)
  assert count.total == pytest.approx(2007e6, rel=0.05)
  most = count.most_images
  assert plan_memory.count(_setting(cost, 16, 4), most).fits
  assert not plan_memory.count(_setting(cost, 16, 4), most + 1).fits


def test_input_binds_where_the_host_is_slow(cost):
  setting = _setting(cost, 2)
  request = points.Request(per_device=32, input_rate=100)
  (point,) = points.plan('sync', [setting], request)
  assert point.rate == pytest.approx(200)
  free = dataclasses.replace(point, seconds=point.seconds | {'input': 0.0})
  assert points.binding(free, point) == 'input'
  assert point.seconds['input'] == pytest.approx(
    64 / 200 - setting.alone(32).total - point.seconds['communication']
  )
  # Cores of the usual host, an image in 50 ms of one: two nodes of one device.
  (point,) = points.plan('sync', [setting], points.Request(per_device=32, image_seconds=0.05))
  assert point.rate == pytest.approx(2 * setting.device.host_cores / 0.05)


@pytest.mark.parametrize('slower, faster', [('exact', 'fast'), ('bicubic', 'bilinear')])
def test_assumed_input_depends_on_decode(slower, faster):
  def seconds(**keys):
    typed = {f'data.{k}': v for k, v in {'source': 'folder', 'path': '/', **keys}.items()}
    return points.input_seconds(command_line.load(_MODERN, typed))

  assert seconds(decode=slower) > seconds(decode=faster) > 0
  assert seconds(source='arrays') == 0
  # Between the 0.11 and 0.23 ms of two machines.
  assert seconds(cache='mapped', decode=slower, image_size='224') == pytest.approx(0.2e-3)


def test_what_stops_paying_is_named(cost):
  settings = [_setting(cost, n) for n in (1, 2, 4, 8)]
  result = points.plan('sync', settings, points.Request(per_device=32))
  last, reason = points.last_that_pays(result)
  # 32 images take a millisecond, their gradients a tenth of a second.
  assert last.cluster.nodes == 1 and reason == 'communication or waiting for the slowest device'


def test_weak_scaling_keeps_the_images_of_the_smallest_size(cost):
  settings = [_setting(cost, n, 8) for n in (1, 2, 4)]
  result = points.plan('sync', settings, points.Request('weak'))
  # The recipe's batch of 1,024 on 8 devices; then 128 images on each.
  assert [p.images for p in result] == [128, 128, 128]
  assert [p.batch for p in result] == [1024, 2048, 4096]
  strong = points.plan('sync', settings, points.Request('strong'))
  assert [p.images for p in strong] == [128, 64, 32]


@pytest.mark.parametrize(
  'name, nodes, parts', [('sync', 1, 1), ('sync', 2, 2), ('parameter_server', 16, 1)]
)
def test_a_run_of_steps_makes_as_many_updates_of_any_batch(cost, name, nodes, parts):
  setting = _setting(cost, nodes, strategy__name=name, duration='32 steps')
  (point,) = points.plan(name, [setting], points.Request(per_device=32))
  assert point.batch == 32 * parts
  assert point.run_seconds == pytest.approx(32 * sum(point.seconds.values()))


@pytest.mark.parametrize(
  'mode, parts, gradients', [('async', 0, 1), ('rennala', 8, 8), ('rennala', 0, 4)]
)
def test_a_servers_step_is_an_update(cost, mode, parts, gradients):
  """Four workers make a gradient a second each."""
  passes = gradients / 4
  keys = {'strategy__mode': mode, 'strategy__parts': str(parts)}
  fields = {'link': plan_settings.FAST, 'measured': (0.75, 0.25 / 32)}
  setting = _setting(cost, 4, **fields, **_SERVER, **keys)
  (point,) = points.plan(mode, [setting], points.Request(per_device=32))
  assert point.batch == 32 * gradients
  assert point.seconds['fixed'] == pytest.approx(0.75 * passes)
  assert point.seconds['compute'] == pytest.approx(0.25 * passes)
  # The servers' optimizer takes milliseconds.
  assert sum(point.seconds.values()) == pytest.approx(passes, rel=0.05)
  assert point.rate == pytest.approx(point.batch / sum(point.seconds.values()))


@pytest.mark.parametrize('measured', [None, (0.3, 0.01)])
def test_a_device_of_several_groups_starts_a_pass_for_each(cost, measured):
  keys = {'strategy__name': 'local_sgd', 'strategy__groups': '4'}
  passes = {1: 4, 2: 2, 4: 1}
  fixed = {}
  for nodes in passes:
    fixed[nodes] = _step(cost, nodes, 64, measured=measured, **keys).fixed
  for nodes, count in passes.items():
    assert fixed[nodes] == pytest.approx(count * fixed[4], rel=1e-12)
  if measured:
    assert fixed[4] == measured[0]


def test_all_devices_of_local_wait_for_the_last_in_each_step(cost):
  keys = {'strategy__name': 'local_sgd', 'strategy__groups': '5', 'strategy__period': '10'}
  late, punctual = (
    _step(cost, 10, jitter=jitter, measured=(1.0, 0.0), **keys).seconds for jitter in (0.1, 0.0)
  )
  # The largest of 10 standard normal numbers is 1.53875 (Harter 1961).
  assert late - punctual == pytest.approx(0.1 * 1.53875, rel=1e-4)


def _timed(cost, nodes, **keys):
  """A step of nodes of one device whose pass takes 1 s, over a link that takes no time."""
  return _step(cost, nodes, **{'link': plan_settings.FAST, 'measured': (1.0, 0.0), **keys})


_SERVER = {'strategy__name': 'parameter_server'}
_RENNALA = _SERVER | {'strategy__mode': 'rennala', 'strategy__parts': '6'}


@pytest.mark.parametrize(
  'keys, slow, seconds',
  [
    ({}, 2.0, 2),
    ({'strategy__name': 'local_sgd', 'strategy__groups': '2'}, 2.0, 2),
    # Updates come at the rate of all workers together.
    (_SERVER, 2.0, 1 / (3 + 1 / 2)),
    # Three make six gradients in two passes, while it computes for 10 s.
    (_RENNALA, 10.0, 2),
  ],
)
def test_a_slow_node_stops_those_that_wait_for_it(cost, keys, slow, seconds):
  step = _timed(cost, 4, slow=(slow,), **keys)
  # The servers' optimizer takes milliseconds.
  assert step.seconds == pytest.approx(seconds, rel=0.05 if 'strategy__mode' in keys else 0.03)


def test_synchronous_servers_do_not_wait_for_backups(cost):
  def seconds(backups):
    keys = _SERVER | {'strategy__mode': 'synchronous', 'strategy__backup_workers': str(backups)}
    return _step(cost, 16, jitter=0.5, measured=(1.0, 0.0), **keys).seconds

  # The largest of 16 normal numbers is 1.766, the third largest 0.990.
  assert seconds(0) - seconds(2) == pytest.approx(0.5 * (1.766 - 0.990), 0.01)


def _handled(cost, nodes, handling=(0.05, 0.2), **keys):
  """A step of passes of 1 s on a core each, which also handle gradients."""
  return _timed(cost, nodes, handling=handling, **_SERVER, **keys)


def test_cores_that_compute_also_handle_gradients(cost):
  step = _handled(cost, 1)
  assert step.seconds == pytest.approx(1.25, rel=1e-6)
  # The other worker waits for the server; the server's core serves both.
  step = _handled(cost, 2)
  other = 1 / (1 + 0.05 + 0.2)
  local = (1 - 0.2 * other) / (1 + 0.05 + 0.2)
  assert 1 / step.seconds == pytest.approx(other + local, rel=1e-6)
  # With a second gradient in flight it does not wait.
  step = _handled(cost, 2, strategy__in_flight='2')
  other = 1 / (1 + 0.05)
  local = (1 - 0.2 * other) / (1 + 0.05 + 0.2)
  assert 1 / step.seconds == pytest.approx(other + local, rel=1e-6)


def test_two_servers_handle_half_of_each_gradient(cost):
  step = _handled(cost, 2, strategy__servers='2')
  # Both cores serve all gradients, and each worker waits for both: of the rate
  # r of one, 1 / r = 1.05 / (1 - 0.1 (2 r)) + 0.1. What one core does to the
  # other is computed in two rounds.
  rate = 1 / step.seconds / 2
  expected = 1.05 / (1 - 0.1 * 2 * rate) + 0.1
  assert 1 / rate == pytest.approx(expected, rel=1e-2)


def test_a_server_without_time_for_its_worker_limits_the_others(cost):
  step = _handled(cost, 16)
  assert step.seconds == pytest.approx(0.2, rel=1e-3)
  step = _handled(cost, 3, strategy__dedicated='True')
  assert 1 / step.seconds == pytest.approx(2 / 1.25, rel=1e-6)


def test_workers_on_one_core_take_turns_with_its_server(cost):
  keys = {'strategy__dedicated': 'True', 'sharing': 3.0}
  # Two workers and a server that has next to nothing to do, on one core.
  step = _handled(cost, 3, (1.0, 1e-6), **keys)
  assert step.seconds == pytest.approx(1 + 1, rel=1e-3)


def test_workers_on_one_core_find_each_other_there():
  assert server_cost._rates([(1.0, 1.0)], 1, 0.0, 0.0) == pytest.approx([0.5])
  # Each is there for the share q of its cycle: q = (1 + q) / (2 + q), which is
  # the golden ratio. (Exactly it is 0.6: the other, alone, is there half the
  # time.)
  ratio = (5**0.5 - 1) / 2
  expected = 1 / (2 + ratio)
  rates = server_cost._rates([(1.0, 1.0)] * 2, 1, 0.0, 0.0)
  assert rates == pytest.approx([expected] * 2, rel=1e-6)
  # Two in flight of a worker: it computes one while another travels.
  assert server_cost._rates([(1.0, 0.5)], 2, 0.0, 0.0) == pytest.approx([1.0])
  # Others take a fifth of the core.
  assert server_cost._rates([(1.0, 1.0)], 1, 0.1, 2.0 - 1 / 2.25) == pytest.approx(
    [1 / 2.25], rel=1e-3
  )


def test_a_synchronous_update_waits_for_all_that_is_handled(cost):
  step = _handled(cost, 4, strategy__mode='synchronous')
  assert step.seconds == pytest.approx(1 + 0.05 + 4 * 0.2, rel=1e-3)


def test_devices_that_share_cores_take_longer(cost):
  step = _timed(cost, 4, sharing=2.0)
  assert step.seconds == pytest.approx(2, rel=1e-4)
  # While one worker of a core sends for half a second, the other has it alone.
  slow = hardware.Link('slow', 8 * 25557032 / 0.5, 1e-15)
  step = _timed(cost, 4, link=slow, sharing=2.0, **_SERVER)
  assert step.seconds == pytest.approx(2 / 4, rel=0.03)


def test_channel_split_sums_gradients_between_its_groups(cost):
  def step(data, model):
    keys = {'mesh__data': str(data), 'mesh__model': str(model)}
    # Nothing pays to be split, and nothing is hidden.
    return _step(cost, 8, strategy__name='channel_split', **keys)

  alone, parts = step(-1, 8), step(-1, 2)
  assert (alone.images, parts.images) == (32, 128)
  assert alone.communication == pytest.approx(0, abs=1e-6)
  # Rings of 4 sum all gradients; two of them share each node's port no more
  # than a node has devices, one.
  expected = 2 * 3 / 4 * _BYTES / 1e9
  assert parts.communication == pytest.approx(expected, rel=1e-3)


def test_accumulated_gradients_are_sent_after_the_last_micro_batch(cost):
  step = _step(cost, 4, 64, efficiency=_SLOW, accumulate='2')
  # The backward pass is long, but nothing is sent during it.
  assert step.communication == pytest.approx(1.5 * _BYTES / 1e9, rel=1e-3)


def test_a_measured_step_has_its_micro_batches_in_it(cost):
  setting = _setting(cost, 1, accumulate='4', measured=(0.25, 0.01))
  assert setting.alone(32).total == pytest.approx(0.25 + 0.32)
  # Counted, it starts its kernels four times.
  counted = _setting(cost, 1, accumulate='4').alone(32).fixed
  once = _setting(cost, 1).alone(32).fixed
  assert counted - once == pytest.approx(3e-9 * cost.kernels)


def test_the_part_that_grew_binds():
  def point(images, fixed, communication):
    seconds = {'compute': 1.0, 'input': 0.0, 'fixed': fixed, 'communication': communication}
    cluster = collectives.Cluster(1, 1, None, None)
    return points.Point('sync', cluster, images, images / sum(seconds.values()), seconds)

  # The fixed part is the largest before and after; an image of 32 instead of
  # 64 pays it twice, 3 s more; communication grows by 0.5 s.
  assert points.binding(point(64, 192, 0), point(32, 192, 16)) == 'fixed'
  # As many images on two devices that compute more each, not half.
  more = dataclasses.replace(point(64, 1, 0), cluster=collectives.Cluster(2, 1, None, None))
  parts = more.seconds | {'compute': 9.0}
  assert points.binding(point(64, 1, 0), dataclasses.replace(more, seconds=parts)) == 'compute'
  # As many images: nothing but communication grew.
  assert points.binding(point(64, 192, 0), point(64, 192, 16)) == ('communication')


@pytest.mark.parametrize(
  'name, shape',
  [
    *(('channel_split', shape) for shape in ((16, 1), (3, -1), (-1, -1), (2, 2))),
    ('sync', (4, 1)),
    ('sync', (4, 2)),  # it has one device along `model`
  ],
)
def test_a_mesh_that_does_not_fit_is_refused(cost, name, shape):
  data, model = map(str, shape)
  setting = _setting(cost, 8, strategy__name=name, mesh__data=data, mesh__model=model)
  (point,) = points.plan(name, [setting], points.Request())
  assert 'config.mesh' in point.why_not and ('8 devices' in point.why_not or name == 'sync')


def test_model_ring_needs_the_slots_of_the_paper_and_sends_its_models(cost):
  config = command_line.load('configs/model_ring_anp.py', {'data.source': 'synthetic'})
  work = dataclasses.replace(cost, examples=6400, total_images=6 * 6400)
  half = dataclasses.replace(plan_settings.PERFECT, wire=0.5)
  setting = plan_settings.setting(config, work, 2, efficiency=half)
  (point,) = points.plan('model_ring', [setting], points.Request())
  # A model's state once in 50 steps of 64 images, at half of 1 GB/s.
  sent = cost.state_bytes / 0.5e9 / 50
  assert point.seconds['communication'] == pytest.approx(sent, rel=1e-3)
  # 4 models, 2 stations, 6 epochs: max(4, 2) x 6 + 2 - 1 = 25 slots, each of
  # 50 steps of 64 images.
  slot = 50 * (setting.alone(64).total + sent)
  assert point.run_seconds == pytest.approx(25 * slot, rel=1e-3)
