"""Early layers by batch, later ones by channels, in one step."""

import jax
import pytest

from anp_jax import config as config_lib
from anp_jax.runtimes.calibration import boundaries, timing, workloads
from anp_jax.training import build
from tests import splitting

OURS = {'model.name': 'tests.user_network:WithOurLayers'}
TWICE = {'model.name': 'tests.user_network:WithLayersUsedTwice'}
RESNET = {'model.name': 'tests.small_networks:ResNet'}
# Its batch norm has the group of the config.
RESNET18 = {'model.name': 'resnet18', 'model.width': 6}
# All layers before the second stage.
EARLY = ('stem_conv', 'stage1_block1/conv1', 'stage1_block1/conv2')


def _split(plan, data=1, model=2, **overrides):
  return splitting.build('channel_split', data, model, **{'strategy.plan': plan}, **overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
  'plan, network, data, model',
  [
    ('conv1=batch; conv2=7,1,2,0', OURS, 2, 4),
    ('conv1=batch', OURS, 1, 2),  # the second by all devices
    ('first=batch; plain=batch; ours=4,2', TWICE, 1, 2),
    *(
      pytest.param(*case, marks=pytest.mark.soak)
      for case in (
        # A split convolution and one of all devices read the map.
        (f'{"=batch; ".join(EARLY)}=batch; stage2_block1/conv1=9,3', RESNET, 1, 2),
        ('conv1=batch', OURS, 1, 1),
        ('conv1=batch; conv2=7,3', OURS, 1, 2),
        ('conv1=batch; conv2=3,1,1,1,1,1,2,0', OURS, 1, 8),
      )
    ),
  ],
)
def test_a_step_is_that_of_the_unsplit_network(x64, plan, network, data, model):
  split = _split(plan, data, model, **network)
  splitting.assert_trains_as_unsplit(*split, **network)


@pytest.mark.slow
def test_micro_batches_are_divided_one_by_one(x64):
  accumulated = {**OURS, 'accumulate': 2}
  split = _split('conv1=batch; conv2=7,3', **accumulated)
  splitting.assert_trains_as_unsplit(*split, **accumulated)


@pytest.mark.slow
def test_what_a_step_sends():
  """A map's rows and their gradient, and what is left of the second map."""
  sent = splitting.sent_by_150x800(plan='conv1=batch; conv2=400,400')
  sizes = {}
  for c in sent:
    if c.size >= 2**16:
      sizes.setdefault(c.kind, []).append(c.size)
  # 16 x 16 pixels that a pool has left of 150 channels, 8 x 8 of 800.
  first, second = 4 * 8 * 16 * 16 * 150, 4 * 8 * 8 * 8 * 800
  assert sorted(sizes['all-gather']) == [first, second]
  assert sizes['all-to-all'] == [first]
  # The gradients of the first layer and of the head, and some numbers.
  unsplit = 4 * (25 * 3 * 150 + 12 * (64 * 800 + 1))
  assert unsplit < sum(sizes['all-reduce']) < unsplit + 8000


@pytest.mark.parametrize(
  'plan, overrides, message',
  [
    ('conv1=batch; conv2=4,4', {}, 'a batch norm is over the whole batch'),
    (
      'conv1=batch; conv2=batch',
      {'model.name': 'tests.user_network:WithDropoutAlone'},
      'dropout would leave out the same of all',
    ),
    ('conv1=batch; conv2=batch', OURS, 'expected a layer after those by batch'),
    ('conv1=5,2; conv2=batch', OURS, 'conv2 is used after them'),
    (f'{"=batch; ".join(EARLY[:-1])}=batch', RESNET, 'incompatible shapes'),
    (
      'conv1=batch',
      {**OURS, 'mesh.model': 3, 'batch_size': 16},
      'expected 6 images in a micro-batch, or another multiple',
    ),
  ],
)
def test_what_cannot_be_divided_is_refused(plan, overrides, message):
  program, mesh = _split(plan, 1, overrides.get('mesh.model', 2), **splitting.FLOAT32, **overrides)
  with pytest.raises(config_lib.ConfigError, match=message):
    program.train_step.lower(program.abstract_state, splitting.batch(mesh, 0))


def test_offload_devices_have_no_part_of_the_batch():
  with pytest.raises(config_lib.ConfigError, match="'conv1=batch': expected features"):
    _split('conv1=batch', **{'strategy.offload_to': ('cpu:1',)})


@pytest.mark.parametrize(
  'overrides, expected',
  [
    # Before a block whose shortcut is a convolution.
    (RESNET, ('stage2_block1/conv1',)),
    # A group of batch norm is larger than half of the batch.
    ({**RESNET18, 'model.norm_group': 0}, ()),
    # A device's only image would be added to all eight of a micro-batch.
    ({**RESNET18, 'model.norm_group': 1, 'mesh.model': 8, 'accumulate': 2}, ()),
    (OURS, ('conv2',)),
    ({'model.name': 'tests.user_network:SmallNet'}, ()),
    ({'model.name': 'tests.user_network:WithDropoutAlone'}, ('conv2',)),
  ],
)
def test_where_layers_by_batch_may_end(overrides, expected):
  program, _ = _split('', 1, overrides.get('mesh.model', 2), **splitting.FLOAT32, **overrides)
  spec = program.spec
  network = build.create(workloads.unsplit(spec, jax.devices()[0]))
  calls = timing.calls(network, spec.config, splitting.BATCH)
  images = timing.images(spec.config, splitting.BATCH)
  tracer = boundaries.Tracer(spec, network, images)
  layers = {call.layer for call in calls}
  assert tracer.find(calls, layers) == expected
  # Not after a layer that has to be computed by all devices.
  assert tracer.find(calls, layers - {calls[0].layer}) == ()
