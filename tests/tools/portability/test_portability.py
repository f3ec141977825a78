"""Compiling ahead of time: targets, what programs say, the step on a CPU.

The matrix of networks and targets is in test_portability_matrix.py.
"""

import json
import re

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from anp_jax.config import command_line
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.tools.portability import __main__ as command, ahead, compiled_collectives, targets
from tests import builders, programs

P = mesh_lib.P


@pytest.mark.parametrize(
  'text, want',
  [
    ('cpu:8', ('cpu', '', (8,))),
    ('gpu:h200:16x4', ('gpu', 'h200', (16, 4))),
    ('tpu:v5e:2x2', ('tpu', 'v5e', (2, 2))),
    ('tpu:v4:2x2x4', ('tpu', 'v4', (2, 2, 4))),
  ],
)
def test_targets(text, want):
  actual = targets.parse(text)
  assert (actual.platform, actual.kind, actual.counts) == want
  assert actual.text == text


@pytest.mark.parametrize(
  'text, message',
  [
    ('', "='': expected cpu:N, gpu:CARD:HOSTSxGPUS, tpu:"),
    ('gpus:h200:1x4', "'gpus:h200:1x4'.*did you mean 'gpu:h200:16x4'"),
    ('cpu', "'cpu': expected cpu:N, such as 'cpu:8'"),
    *((f'cpu:{count}', 'expected cpu:N') for count in ('0', '-1', '2x2', '8:8', '99999')),
    ('gpu:h20:1x4', "'h20': expected one of h200; did you mean 'h200'"),
    *((f'gpu:h200{count}', 'expected gpu:CARD:HOSTSxGPUS') for count in (':4', '', ':1x4x2')),
    ('tpu:v5:2x2', "'v5': expected one of v2.*did you mean 'v5"),
    ('tpu:v5e:4', 'expected tpu:GENERATION:TOPOLOGY'),
    ('tpu:v5e:2x', 'expected tpu:GENERATION:TOPOLOGY'),
    ('tpu', "'': expected one of v2"),
  ],
)
def test_a_mistyped_target_is_refused_in_one_line(text, message, capsys):
  arguments = ['--config=configs/resnet_anp.py:tiny', f'--target={text}']
  assert command.main(arguments) == 2
  assert re.match(f'error: --target.*{message}', builders.error_line(capsys))


@pytest.mark.parametrize(
  'arguments, message',
  [
    (['--target=cpu:8'], '--config=FILE.* is missing'),
    (['--config=configs/resnet_anp.py:tiny'], '--target is missing'),
    (
      ['--config=configs/resnet_anp.py:tiny', '--targt=cpu:8'],
      "unknown argument '--targt.*did you mean '--target'",
    ),
    (
      ['--config=configs/resnet_anp.py:tiny', '--target=cpu:8', '--config.model.dtype=bf16'],
      "dtype='bf16': expected .*'bfloat16'",
    ),
  ],
)
def test_a_bad_command_is_refused_in_one_line(arguments, message, capsys):
  assert command.main(arguments) == 2
  assert re.search(message, builders.error_line(capsys))


def test_a_missing_plugin_is_named(monkeypatch, capsys):
  find = targets.importlib.util.find_spec
  plugins = ('libtpu', 'jax_cuda13_plugin', 'jax_cuda12_plugin')
  monkeypatch.setattr(
    targets.importlib.util, 'find_spec', lambda name: None if name in plugins else find(name)
  )
  status = command.main(
    ['--config=configs/resnet_anp.py:tiny', '--target=tpu:v5e:2x2', '--target=gpu:h200:1x4']
  )
  out, err = capsys.readouterr()
  assert status == 1
  tpu, gpu = err.splitlines()
  assert tpu.startswith('error: tpu:v5e:2x2: libtpu is not installed: pip ')
  assert "'jax[tpu]'" in tpu and "'jax[cuda13-local]'" in gpu
  report = json.loads(out.splitlines()[-1])['targets']
  assert report['gpu:h200:1x4']['why_not'] in gpu


def test_what_xla_is_told_is_what_a_run_tells_it(monkeypatch):
  monkeypatch.setattr(targets.xla_flags, '_devices_are_open', bool)
  config, report = command_line.load('configs/lenet.py', {}), {}
  for text in ('cpu:4', 'gpu:h200:1x4', 'tpu:v5e:2x2'):
    report[text] = {}
    targets.prepare(targets.parse(text), config, report[text])
    assert report[text]['JAX_PLATFORMS'] == 'cpu'
  assert 'latency_hiding' in report['gpu:h200:1x4']['XLA_FLAGS']
  assert '--xla_cpu' in report['cpu:4']['XLA_FLAGS']
  assert 'XLA_FLAGS' not in report['tpu:v5e:2x2']
  assert report['cpu:4']['JAX_NUM_CPU_DEVICES'] == '4'


_HEAD = """HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[]}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%wide (c: f32[8,8]) -> f32[8,8] {
  %c = f32[8,8]{1,0} parameter(0)
  ROOT %dot = f32[8,8]{1,0} dot(%c, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[16], y: bf16[3,5], z: s32[], w: f32[8,8]) -> f32[] {
  %x = f32[16]{0} parameter(0)
  %y = bf16[3,5]{1,0} parameter(1)
  %z = s32[] parameter(2)
  %w = f32[8,8]{1,0} parameter(3)
"""  # noqa: E501
_WRAPPED = """
%wrapped (d: f32[16]) -> f32[16] {
  %d = f32[16]{0} parameter(0)
  ROOT %all-reduce.9 = f32[16]{0} all-reduce(%d), to_apply=%sum
}
"""


def _program(*lines):
  """A program's text; with the computation %wrapped where it is called."""
  body = ''.join(f'  {line}\n' for line in lines)
  head, entry, main = _HEAD.partition('\nENTRY')
  wrapped = _WRAPPED * ('calls=%wrapped' in body)
  return f'{head}{wrapped}{entry}{main}{body}  ROOT %l = f32[] constant(0)\n}}\n'


def _sums(*lines):
  """{dtype: (elements, bytes, overlapping compute, overlapping products)} of a program."""
  rows = compiled_collectives.totals(compiled_collectives.compiled(_program(*lines)))
  assert {row['kind'] for row in rows} == {'all-reduce'}
  keys = ('elements', 'bytes', 'overlapping_compute', 'overlapping_products')
  return {row['dtype']: tuple(row[key] for key in keys) for row in rows}


def test_a_sum_of_several_arrays_that_the_program_waits_for():
  line = (
    '%r = (f32[16]{0}, bf16[3,5]{1,0}, /*index=2*/s32[]) all-reduce(%x, %y, '
    '/*index=2*/%z), replica_groups=[1,4]<=[4], to_apply=%sum'
  )
  want = {'float32': (16, 64, 0, 0), 'bfloat16': (15, 30, 0, 0), 'int32': (1, 4, 0, 0)}
  assert _sums(line) == want


_START = '%r = f32[16]{0} all-reduce-start(%x), to_apply=%sum'
_DONE = '%done = f32[16]{0} all-reduce-done(%r)'
_NEGATE = '%n = f32[8,8]{1,0} negate(%w)'
_PRODUCT = '%f = f32[8,8]{1,0} fusion(%w), kind=kOutput, calls=%wide'


@pytest.mark.parametrize(
  'lines, overlapping',
  [
    # Begun and waited for at once: nothing overlaps it but bookkeeping.
    ([_START, '%b = f32[64]{0} bitcast(%w)', _DONE, _PRODUCT], (0, 0)),
    # Something is computed meanwhile, but no product.
    ([_START, _NEGATE, _DONE], (64, 0)),
    # A product within a fusion; a library's.
    ([_START, _PRODUCT, _DONE], (64, 64)),
    (
      [
        _START,
        '%y2 = (f32[8,8]{1,0}, u8[16]{0}) custom-call(%w, %w), custom_call_target="__cublas$gemm"',
        _DONE,
      ],
      (64, 64),
    ),
    # The general form, with a computation of its own.
    (
      [
        '%r = ((f32[16]{0}), f32[16]{0}) async-start(%x), calls=%wrapped',
        '%u = ((f32[16]{0}), f32[16]{0}) async-update(%r)',
        _PRODUCT,
        '%done = f32[16]{0} async-done(%u)',
      ],
      (64, 64),
    ),
  ],
)
def test_bytes_that_are_sent_during_compute(lines, overlapping):
  assert _sums(*lines) == {'float32': (16, 64, *overlapping)}


def test_of_two_sums_that_overlap_each_other_neither_overlaps_compute():
  other = '%s = bf16[3,5]{1,0} all-reduce-start(%y), to_apply=%sum'
  rows = _sums(_START, other, _DONE, '%done2 = bf16[3,5]{1,0} all-reduce-done(%s)')
  assert rows == {'float32': (16, 64, 0, 0), 'bfloat16': (15, 30, 0, 0)}


@pytest.mark.parametrize(
  'line, kind, elements',
  [
    # The whole array: of what each device has a part, and of what it gets one.
    ('f32[64]{0} all-gather(%x), dimensions={0}', 'all-gather', 64),
    ('f32[4]{0} reduce-scatter(%x), dimensions={0}, to_apply=%sum', 'reduce-scatter', 16),
    ('(f32[16]{0}, f32[64]{0}) all-gather-start(%x), dimensions={0}', 'all-gather', 64),
    (
      '(f32[16]{0}, f32[16]{0}, u32[], u32[]) collective-permute-start(%x)',
      'collective-permute',
      16,
    ),
    ('f32[16]{0} all-to-all(%x), dimensions={0}', 'all-to-all', 16),
  ],
)
def test_bytes_are_those_of_the_whole_array(line, kind, elements):
  result = f'f32[{elements}]{{0}}'
  lines = [f'%r = {line}']
  if '-start' in line:
    lines.append(f'%done = {result} {kind}-done(%r)')
  (row,) = compiled_collectives.totals(compiled_collectives.compiled(_program(*lines)))
  assert (row['kind'], row['elements']) == (kind, elements)
  assert row['bytes'] == 4 * elements


def test_a_permutation_sends_its_bytes_once_for_each_pair():
  line = '%r = f32[25]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}'
  (row,) = compiled_collectives.totals(compiled_collectives.compiled(_program(line)))
  assert (row['bytes'], row['permuted']) == (100, 200)


def test_without_a_schedule_nothing_overlaps_anything():
  text = _program(_START, _NEGATE, _DONE)
  text = text.replace(' is_scheduled=true,', '')
  (row,) = compiled_collectives.totals(compiled_collectives.compiled(text))
  assert row['bytes'] == 64 and row['overlapping_compute'] == 0


@pytest.mark.parametrize(
  'sums, want',
  [
    ({('all-reduce', 'float32'): 110, ('all-reduce', 'int32'): 200}, ['float32']),
    ({('all-reduce', 'bfloat16'): 100, ('all-reduce', 'float32'): 10}, ['bfloat16']),
    # Equal gradients are sent once.
    ({('all-reduce', 'bfloat16'): 90, ('all-reduce', 'float32'): 10}, ['bfloat16']),
    # Some in one dtype and some in another: both are named.
    ({('all-reduce', 'bfloat16'): 80, ('all-reduce', 'float32'): 30}, ['bfloat16', 'float32']),
    # Divided parameters and whole ones.
    ({('reduce-scatter', 'float32'): 8, ('all-reduce', 'float32'): 8}, ['float32']),
    ({('all-gather', 'bfloat16'): 100, ('all-reduce', 'float32'): 110}, ['float32']),
    ({('all-reduce', 'float32'): 10}, []),
    ({}, []),
  ],
)
def test_dtypes_of_gradients(sums, want):
  rows = [
    {'kind': kind, 'dtype': dtype, 'conditional': False, 'elements': n}
    for (kind, dtype), n in sums.items()
  ]
  # Beside the gradients ten numbers are summed.
  assert compiled_collectives.gradient_dtypes(rows, 10) == want


def _before_and_after_xla(shard, specs, *arguments):
  """The collectives that a program of four devices asks for, and those of its compiled form."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('data',))
  lowered = programs.mapped(shard, mesh, specs, P()).lower(*arguments)
  return (
    compiled_collectives.asked(lowered.as_text()),
    compiled_collectives.compiled(lowered.compile().as_text()),
  )


def test_a_real_program_is_read_before_and_after_xla():
  def shard(x, y):
    summed = lax.psum((x, y.astype('float32')), 'data')
    part = lax.psum_scatter(x, 'data', tiled=True)
    return *summed, lax.all_gather(part * 2, 'data', tiled=True)

  for actual in _before_and_after_xla(
    shard, P('data'), jnp.ones((48, 2)), jnp.ones(20, 'bfloat16')
  ):
    rows = {r['kind']: r for r in compiled_collectives.totals(actual)}
    assert {r['dtype'] for r in rows.values()} == {'float32'}
    # A device's own 12 x 2 and 5 numbers are summed.
    assert rows['all-reduce']['bytes'] == 4 * (24 + 5)
    assert rows['reduce-scatter']['bytes'] == 4 * 24
    assert rows['all-gather']['bytes'] == 4 * 24
    assert not any(r['overlapping_compute'] for r in rows.values())


def test_what_is_sent_now_and_then_is_told_apart():
  def shard(x, due):
    each = lax.psum(x, 'data')
    other = lax.cond(due, lambda: lax.psum(each[:2], 'data'), lambda: each[:2])
    return lax.pmax(other, 'data')

  for actual in _before_and_after_xla(shard, (P('data'), P()), jnp.ones((48, 3)), True):
    rows = compiled_collectives.totals(actual)
    sent = {(r['conditional'], r['operations'], r['elements']) for r in rows}
    assert sent == {(True, 1, 6), (False, 2, 36 + 6)}
    assert compiled_collectives.sums(rows) == {'float32': 42}


def test_bfloat16_is_seen_where_it_is_asked_for():
  collectives, _ = _before_and_after_xla(
    lambda x: lax.psum(x, 'data'), P('data'), jnp.ones((48, 2), 'bfloat16')
  )
  (row,) = compiled_collectives.totals(collectives)
  assert (row['dtype'], row['bytes']) == ('bfloat16', 2 * 24)


def test_what_does_not_fit_a_target_is_said(config):
  config.batch_size = 12
  builders.assert_refused('batch_size=12.*8 devices', ahead.inspect, config, targets.parse('cpu:8'))
  builders.assert_refused('cpu:9: .* 8 CPU devices', ahead.inspect, config, targets.parse('cpu:9'))


@pytest.mark.slow
def test_steps_of_lenet_on_eight_cpus(config):
  """The published count with 10 classes, and 500 weights more for each further colour."""
  count, side = 432_080, 28
  config.model.name = 'lenet'
  config.data.image_size = config.data.resize = side
  config.data.synthetic_classes = 10
  config.batch_size, config.batch_size_per_device = 0, 2
  actual = ahead.inspect(config, targets.parse('cpu:8'))
  assert (actual['devices'], actual['parameters']) == (8, count)
  train = actual['train']
  assert train['images'] == 16 and actual['eval']['images'] == 32 and config.batch_size == 0
  for text in ('asked', 'compiled'):
    assert train[f'gradients_{text}'] == ['float32'] == [actual['named_dtype']]
    # The gradients, two sums of metrics, the weight, the rows without one and
    # the counts of four votes; nothing else.
    (row,) = train[text]
    assert (row['kind'], row['dtype'], row['bytes']) == ('all-reduce', 'float32', 4 * (count + 8))
    # Loss, weight, and top 1 and 5.
    (row,) = actual['eval'][text]
    assert row['bytes'] == 4 * 4
  assert not any(r['overlapping_compute'] for r in train['compiled'])
  # Two images a device: a forward and two backward products a weight at least.
  assert train['flops'] > 2 * 3 * 2 * count
  # Weights and momentum are there once; the batch is.
  memory = train['memory']
  assert memory['in_place'] >= 2 * 4 * count
  assert memory['arguments'] >= memory['in_place'] + 2 * 3 * side**2
  assert memory['together'] < memory['arguments'] + memory['temporary'] + 1e4


def test_bytes_that_a_ring_sends():
  """Four devices: each sends 3/4 of what is gathered, twice it for a sum."""
  rows = [
    {'kind': 'all-reduce', 'bytes': 4e6, 'permuted': 0, 'conditional': False},
    {'kind': 'all-gather', 'bytes': 8e6, 'permuted': 0, 'conditional': False},
  ]
  each = (2 * 4e6 + 8e6) * 3 / 4
  assert compiled_collectives.sent(rows, 4) == pytest.approx(4 * each / 1e6, rel=1e-12)
  # Two groups of two: half of it within each, and half of a sum between them
  # in one step of eight.
  rows.append({'kind': 'all-reduce', 'bytes': 6e6, 'permuted': 0, 'conditional': True})
  each = (2 * 4e6 + 8e6) / 2 + 2 * 6e6 / 2 / 8
  assert compiled_collectives.sent(rows, 4, 2, 1 / 8) == pytest.approx(4 * each / 1e6)
  # Two devices swap 100 bytes, and so do two of four.
  swap = {'kind': 'collective-permute', 'bytes': 100, 'permuted': 200, 'conditional': False}
  for devices in (2, 4):
    assert compiled_collectives.sent([swap], devices) == pytest.approx(200 / 1e6)
