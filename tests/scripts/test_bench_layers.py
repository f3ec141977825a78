"""The bench of a step's layers: reading programs and profiles, counting."""

import json
import math
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from anp_jax.models import resnet
from anp_jax.tools.portability import compiled_program as program_lib
from scripts.bench import _places, _shares, _trace, layers as bench_layers

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_BACKWARD = 'jit(train_step)/transpose(jvp(Net))'

# As XLA writes them: tuples with index comments, layouts with tiles, quotes in
# op_names, instructions without metadata. A convolution of a (2, 6, 6, 8) input
# with a 3x3 kernel to 16 channels: 576 elements in the input, 1,152 in the
# kernel.
_TEXT = r"""HloModule jit_train_step, is_scheduled=true, entry_computation_layout={()->f32[]}

%region_add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b), metadata={op_name="reduce_sum"}
}

%fused_dot (p0: f32[72,16], p1: f32[16,72]) -> f32[72,72] {
  %p0 = f32[72,16]{1,0} parameter(0)
  %p1 = f32[16,72]{1,0} parameter(1)
  %dot.9 = f32[72,72]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(train_step)/transpose(jvp(Net))/block/conv/dot_general"}
  ROOT %negate.1 = f32[72,72]{1,0} negate(%dot.9), metadata={op_name="jit(train_step)/transpose(jvp(Net))/block/norm/neg"}
}

%fused_unnamed (p2: f32[10,20], p3: s32[]) -> bf16[2,20] {
  %p2 = f32[10,20]{1,0:T(8,128)} parameter(0)
  %p3 = s32[] parameter(1)
  %dynamic-slice.1 = f32[2,20]{1,0} dynamic-slice(%p2, %p3, %p3), dynamic_slice_sizes={2,20}
  ROOT %convert.1 = bf16[2,20]{1,0} convert(%dynamic-slice.1), metadata={op_name="jit(train_step)/jvp(Net)/max_pool/convert"}
}

%fused_update (p4: f32[10,20], p5: f32[1,20], p6: s32[]) -> f32[10,20] {
  %p4 = f32[10,20]{1,0} parameter(0)
  %p5 = f32[1,20]{1,0} parameter(1)
  %p6 = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = f32[10,20]{1,0} dynamic-update-slice(%p4, %p5, %p6, %p6)
}

%body (t: (s32[], f32[10,20])) -> (s32[], f32[10,20]) {
  %t = (s32[], f32[10,20]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[10,20]{1,0} get-tuple-element(%t), index=1
  %copy.7 = f32[10,20]{0,1} copy(%x)
  ROOT %tuple.1 = (s32[], f32[10,20]{1,0}) tuple(%i, %copy.7)
}

%condition (u: (s32[], f32[10,20])) -> pred[] {
  %u = (s32[], f32[10,20]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main.9 (image: u8[2,6,6,8], w: f32[3,3,8,16]) -> (f32[3,3,8,16], /*index=1*/f32[2,6,6,8]) {
  %image = u8[2,6,6,8]{3,2,1,0} parameter(0), metadata={op_name="batch[\'image\']/x"}
  %w = f32[3,3,8,16]{3,2,1,0} parameter(1), metadata={op_name="state.params[\'conv\']/x"}
  %convert.3 = f32[2,6,6,8]{3,2,1,0} convert(%image), metadata={op_name="jit(train_step)/jvp()/input/convert"}
  %conv.1 = f32[2,6,6,16]{3,2,1,0} convolution(%convert.3, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, metadata={op_name="jit(train_step)/jvp(Net)/block/conv/conv_general_dilated" stack_frame_id=4}
  %relu.1 = f32[2,6,6,16]{3,2,1,0} maximum(%conv.1, %conv.1), metadata={op_name="jit(train_step)/jvp(Net)/block/jit(relu)/max"}
  %transpose_copy.1 = f32[8,2,6,6]{3,2,1,0} transpose(%convert.3), dimensions={3,0,1,2}
  %conv.2 = f32[3,3,16,8]{3,2,1,0} convolution(%transpose_copy.1, %relu.1), window={size=6x6}, dim_labels=b01f_01io->b01f, metadata={op_name="jit(train_step)/transpose(jvp(Net))/block/conv/conv_general_dilated"}
  %transpose.2 = f32[3,3,8,16]{3,2,1,0} transpose(%conv.2), dimensions={0,1,3,2}, metadata={op_name="jit(train_step)/transpose(jvp(Net))/block/conv/transpose"}
  %fusion.1 = f32[72,72]{1,0} fusion(%relu.1, %w), kind=kOutput, calls=%fused_dot, metadata={op_name="jit(train_step)/transpose(jvp(Net))/block/norm/neg"}
  %pad.1 = f32[2,6,6,8]{3,2,1,0} pad(%fusion.1), metadata={op_name="jit(train_step)/transpose(jvp(Net))/block/conv/pad"}
  %conv.3 = f32[3,3,8,16]{3,2,1,0} convolution(%pad.1, %relu.1), window={size=6x6}, metadata={op_name="jit(train_step)/transpose(jvp(Net))/before/conv/conv_general_dilated"}
  %conv.4 = f32[2,6,6,16]{3,2,1,0} convolution(%convert.3, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, metadata={op_name="jit(train_step)/jvp(Net)/block/block._gated/conv/conv.convolve/conv_general_dilated"}
  %negate.5 = f32[5]{0} negate(%big), metadata={op_name="jit(train_step)/transpose(jvp(Net))/block/conv/neg"}
  %negate.6 = f32[6]{0} negate(%negate.5), metadata={op_name="jit(train_step)/transpose(jvp(Net))/block/norm/neg"}
  %negate.7 = f32[1152]{0} negate(%negate.6), metadata={op_name="jit(train_step)/mul"}
  %dynamic-update-slice.2 = f32[10,20]{1,0} dynamic-update-slice(%big, %one_row, %zero, %zero)
  %reduce.1 = f32[16]{0} reduce(%relu.1, %w), dimensions={0,1,2}, to_apply=%region_add
  %norm.1 = f32[16]{0} multiply(%reduce.1, %reduce.1), metadata={op_name="jit(train_step)/jvp(Net)/block/norm/mul"}
  %big = f32[10,20]{1,0} constant({...})
  %zero = s32[] constant(0)
  %one_row = f32[1,20]{1,0} constant({...})
  %fusion.2 = bf16[2,20]{1,0} fusion(%big, %zero), kind=kLoop, calls=%fused_unnamed
  %fusion.3 = f32[10,20]{1,0} fusion(%big, %one_row, %zero), kind=kLoop, calls=%fused_update, metadata={op_name="jit(train_step)/mul"}
  %before = (s32[], f32[10,20]{1,0}) tuple(%zero, %fusion.3)
  %while.1 = (s32[], f32[10,20]{1,0}) while(%before), condition=%condition, body=%body, metadata={op_name="jit(train_step)/jvp(Net)/head/while"}
  %transpose_copy.3 = f32[8,2,6,6]{3,2,1,0} transpose(%convert.3), dimensions={3,0,1,2}
  %custom.1 = (f32[3,3,8,16]{3,2,1,0}, u8[16]{0}) custom-call(%relu.1, %transpose_copy.3), custom_call_target="__cudnn$convBackwardFilter", metadata={op_name="jit(train_step)/transpose(jvp(Net))/block/conv/conv_general_dilated"}
  %lonely = f32[7]{0} copy(%one_row)
  %nll = f32[2]{0} log(%norm.1), metadata={op_name="jit(train_step)/jvp(jit(log_softmax))/log"}
  ROOT %out = (f32[3,3,8,16]{3,2,1,0}, /*index=1*/f32[2,6,6,8]{3,2,1,0}) tuple(%transpose.2, %pad.1)
}
"""  # noqa: E501


@pytest.fixture(scope='module')
def program():
  return program_lib.Program(_TEXT)


def test_instructions_are_read(program):
  assert program.name == 'jit_train_step'
  conv = program.instructions['conv.1']
  assert conv.opcode == 'convolution'
  assert conv.arrays == (('f32', (2, 6, 6, 16)),)
  assert conv.operands == ('convert.3', 'w')
  assert conv.op_name.endswith('jvp(Net)/block/conv/conv_general_dilated')
  loop = program.instructions['while.1']
  assert set(loop.called) == {'condition', 'body'}
  assert loop.arrays == (('s32', ()), ('f32', (10, 20)))
  assert program.instructions['image'].op_name == r'batch[\'image\']/x'
  inside = [i.name for i in program.inside(program.instructions['fusion.1'])]
  assert inside == ['p0', 'p1', 'dot.9', 'negate.1']


@pytest.mark.parametrize(
  'name, origin',
  [
    # Its own.
    ('relu.1', 'jit(train_step)/jvp(Net)/block/jit(relu)/max'),
    # Of the product in it, whatever its root says.
    ('fusion.1', f'{_BACKWARD}/block/conv/dot_general'),
    # Of its root, where the fusion itself has none.
    ('fusion.2', 'jit(train_step)/jvp(Net)/max_pool/convert'),
    # Of its user; a sum's own body is no layer.
    ('transpose_copy.1', f'{_BACKWARD}/block/conv/conv_general_dilated'),
    ('reduce.1', 'jit(train_step)/jvp(Net)/block/norm/mul'),
    # Of the loop around it.
    ('copy.7', 'jit(train_step)/jvp(Net)/head/while'),
    # Of nothing: arguments and constants are no layers.
    ('lonely', ''),
  ],
)
def test_origin(program, name, origin):
  assert program.origin(program.instructions[name]) == origin


@pytest.mark.parametrize(
  'name, count',
  [
    ('conv.1', 4 * (2 * 6 * 6 * 8 + 3 * 3 * 8 * 16 + 2 * 6 * 6 * 16)),
    ('convert.3', (1 + 4) * 2 * 6 * 6 * 8),  # uint8 to float32
    ('fusion.2', 4 + 4 * 40 + 2 * 40),  # reads a slice, writes bfloat16
    ('fusion.3', 4 + 4 * 20 + 4 * 20),  # writes a row of a larger array
    ('dynamic-update-slice.2', 4 * 20 + 4 * 20),
    ('custom.1', 4 * (2 * 6 * 6 * (16 + 8) + 3 * 3 * 8 * 16) + 16),
  ],
)
def test_traffic(program, name, count):
  assert program.traffic(program.instructions[name]) == count


@pytest.mark.parametrize(
  'name, where',
  [
    ('conv.1', ('3x3 convolution', 'forward')),
    ('relu.1', ('activation and add', 'forward')),
    ('reduce.1', ('norm', 'forward')),
    # Below the method of a layer that calls another.
    ('conv.4', ('3x3 convolution', 'forward')),
    ('fusion.2', ('max pool', 'forward')),
    ('copy.7', ('head', 'forward')),
    ('convert.3', ('input', '')),
    ('nll', ('loss', 'forward')),
    ('fusion.3', ('update', '')),
    ('lonely', ('other', '')),
    # As large as the kernel, though not of its shape.
    ('conv.2', ('3x3 convolution', 'weight gradient')),
    ('transpose.2', ('3x3 convolution', 'weight gradient')),
    ('custom.1', ('3x3 convolution', 'weight gradient')),
    # As large as the input, but it leads to the kernel's gradient.
    ('transpose_copy.1', ('3x3 convolution', 'weight gradient')),
    ('transpose_copy.3', ('3x3 convolution', 'weight gradient')),
    # As large as neither, but it leads to what is as large as the input.
    ('fusion.1', ('3x3 convolution', 'input gradient')),
    ('pad.1', ('3x3 convolution', 'input gradient')),
    # What is far behind it, and not of the layer, does not tell.
    ('negate.5', ('3x3 convolution', 'backward')),
  ],
)
def test_place(program, name, where):
  layers = {
    'block/conv': _places.Layer((3, 3, 8, 16), (2, 6, 6, 8), (2, 6, 6, 16)),
    'block/norm': _places.Layer((16,), (2, 6, 6, 16), (2, 6, 6, 16)),
    'head': _places.Layer((20, 10), (10, 20), (10, 10)),
  }
  instruction = program.instructions[name]
  assert _places.place(program, instruction, 'Net', layers) == where


@pytest.mark.parametrize(
  'kernel, kind',
  [
    ((5, 5, 1, 8), '5x5 depthwise convolution'),
    ((3, 3, 4, 16), '3x3 grouped convolution'),
    ((3, 3, 8, 16), '3x3 convolution'),
  ],
)
def test_convolutions_of_groups_are_kinds_of_their_own(kernel, kind):
  layer = _places.Layer(kernel, (2, 6, 6, 8), (2, 6, 6, kernel[-1]))
  assert layer.kind == kind
  assert layer.flops == 2 * 2 * 6 * 6 * kernel[-1] * math.prod(kernel[:3])


@pytest.mark.parametrize(
  'instruction, name',
  [
    ('conv.1', 'block/conv'),
    ('conv.2', 'block/conv'),
    ('reduce.1', 'block/norm'),
    ('copy.7', 'head'),
    ('fusion.2', 'max pool'),
    ('convert.3', 'input'),
    ('fusion.3', 'update'),
  ],
)
def test_layers_have_their_paths_as_names(program, instruction, name):
  layer = _places.Layer((3, 3, 8, 16), (2, 6, 6, 8), (2, 6, 6, 16))
  layers = dict.fromkeys(('block/conv', 'block/norm', 'head'), layer)
  instruction = program.instructions[instruction]
  assert _places.layer_name(program, instruction, 'Net', layers) == name


def test_speed_ups_are_medians_over_medians():
  times = {
    (_shares.ALONE, 1): [{'a': 4.0, 'b': 1.0}, {'a': 8.0, 'b': 1.0}, {'a': 6.0, 'b': 1.0}],
    (_shares.ALONE, 4): [{'a': 2.0, 'b': 1.0}],
    (_shares.AT_ONCE, 2): [{'a': 3.0, 'b': 1.0}, {'a': 5.0, 'b': 1.0}],
  }
  rows, ratios = _shares.table(times)
  assert ratios == {
    'a_4_alone': 3.0,
    'b_4_alone': 1.0,
    'all_4_alone': pytest.approx(7 / 3),
    'a_2_at_once': 1.5,
    'b_2_at_once': 1.0,
    'all_2_at_once': 7 / 5,
  }
  assert rows[0] == ('layer', '% of the step', '1/4 alone', '1/2 at once')
  assert rows[2] == ('a', '85.7', '3.00', '1.50')


@pytest.mark.parametrize(
  'batch, count, images', [(64, 2, 32), (64, 12, 6), (100, 16, 7), (64, 1, 64)]
)
def test_the_largest_share_counts(batch, count, images):
  assert _shares.images(batch, count) == images


def test_the_whole_batch_is_the_first_share(monkeypatch, capsys):
  monkeypatch.setattr(sys, 'argv', ['layers.py', '--shares=2,4'])
  with pytest.raises(SystemExit) as ended:
    bench_layers.main()
  assert ended.value.code == 2
  assert '--shares=2,4: expected 1, the' in capsys.readouterr().err


def test_only_a_weight_gradient_where_the_input_is_the_image(program):
  stem = _places.Layer((3, 3, 8, 16), (2, 6, 6, 8), (2, 6, 6, 16), learned_input=False)
  pad = program.instructions['pad.1']
  location = _places.place(program, pad, 'Net', {'block/conv': stem})
  assert location == ('3x3 stem', 'weight gradient')


def _run(thread, name, start, stop, **stats):
  """An instruction's event; times in seconds."""
  stats = {'hlo_op': name, 'hlo_module': 'jit_train_step'} | stats
  return _event(thread, name, start, stop, **stats)


def _event(thread, name, start, stop=None, plane='/host:CPU', **stats):
  stop = start if stop is None else stop
  return _trace.Event((plane, thread), name, 1e9 * start, 1e9 * (stop - start), stats)


def _task(giver, thread, number, pending, start, stop):
  return [
    _event(giver, 'ThreadpoolListener::Record', pending, _p=number),
    _event(thread, 'ThreadpoolListener::StartRegion', start, _c=number),
    _event(thread, 'ThreadpoolListener::StopRegion', stop),
  ]


def _seconds(program, *events):
  spent = _trace.spent(events, program)
  return {k: pytest.approx(v) for k, v in spent.seconds.items()}, spent


def test_instructions_that_overlap_share_the_time(program):
  seconds, spent = _seconds(program, _run('a', 'conv.1', 0, 4), _run('b', 'conv.2', 3, 7))
  assert seconds == {'conv.1': 3.5, 'conv.2': 3.5}
  assert spent.threads == pytest.approx(8 / 7)


def test_a_task_counts_for_the_instruction_that_gave_it_away(program):
  # The call ends at once; two tasks of 4 s follow, the second given by the
  # first. Between 3 and 5 s another instruction overlaps them.
  seconds, spent = _seconds(
    program,
    _run('a', 'conv.1', 0, 1),
    *_task('a', 'b', 7, 0.5, 1, 5),
    *_task('b', 'c', 8, 2, 5, 9),
    _run('a', 'relu.1', 3, 5),
  )
  assert seconds == {'conv.1': 1 + 2 + 1 + 4, 'relu.1': 1}
  assert spent.threads == pytest.approx(11 / 9)


def test_a_thread_works_for_the_innermost(program):
  # Waiting inside of one instruction, a thread does another's task, and in a
  # task a thread begins instructions.
  seconds, _ = _seconds(
    program,
    _run('a', 'conv.1', 0, 10),
    _run('b', 'conv.2', 0, 1),
    *_task('b', 'a', 7, 0.5, 2, 6),
    _run('a', 'relu.1', 3, 4),
    *_task('python', 'a', 8, 0, 7, 8),  # of no instruction
  )
  assert seconds == {'conv.1': 0.5 + 1 + 3, 'conv.2': 0.5 + 3, 'relu.1': 1}


def test_time_in_which_no_thread_works_is_nobodys(program):
  seconds, spent = _seconds(
    program,
    _run('a', 'conv.1', 0, 1),
    *_task('python', 'client', 7, 0, 0, 9),  # waits for the step
    _event('a', 'end: conv.1', 5, 6),
    _event('a', 'ThunkExecutor::Execute', 0, 9),
    _event('a', 'ThreadpoolListener::StopRegion', 0.5),  # begun before
    _run('a', 'conv.1', 3, 4),
    _run('a', 'relu.1', 4, 4),
  )
  assert seconds == {'conv.1': 2, 'relu.1': 0}
  assert spent.runs == {'conv.1': 2, 'relu.1': 1}
  assert spent.threads == pytest.approx(1)


def test_a_loop_counts_through_its_body_only(program):
  seconds, _ = _seconds(
    program, _run('a', 'while.1', 0, 10), _run('a', 'copy.7', 1, 2), _run('a', 'copy.7', 4, 6)
  )
  assert seconds == {'copy.7': 3}
  # Where the profile does not show the body, the loop counts itself.
  assert _seconds(program, _run('a', 'while.1', 0, 10))[0] == {'while.1': 10}


def test_other_programs_do_not_count(program):
  seconds, _ = _seconds(
    program,
    _run('a', 'conv.1', 0, 1),
    _run('a', 'conv.1', 1, 2, hlo_module='jit_other'),
    _run('a', 'conv.77', 2, 3),
  )
  assert seconds == {'conv.1': 1}


@pytest.mark.parametrize(
  'line, stats',
  [
    ('Stream #20(Compute)', {'hlo_op': 'conv.1'}),
    ('XLA Ops', {}),  # a TPU's: the event's name is the instruction's
  ],
)
def test_a_device_counts_on_one_kind_of_line(program, line, stats):
  seconds, _ = _seconds(
    program,
    _event(line, 'conv.1', 0, 2, '/device:GPU:0', **stats),
    _event('XLA Modules', 'conv.1', 0, 5, '/device:GPU:0'),
    _event('XLA Ops' if stats else 'Steps', 'conv.1', 3, 9, '/device:GPU:0'),
    _run('python', 'conv.1', 20, 30),
  )
  assert seconds == {'conv.1': 2}


@pytest.mark.slow
def test_operations_of_resnet_50():
  model = resnet.ResNet(1000, stages=(3, 4, 6, 3), bottleneck=True)
  images = jax.ShapeDtypeStruct((2, 224, 224, 3), 'float32')
  variables = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(images.shape), False))
  counts = _places.flops(_places.shapes(model, images, variables))
  # By hand. A 1x1 convolution of 64 channels at 56 x 56 pixels, two images:
  unit = 2 * 2 * 56 * 56 * 64 * 64
  # and every other is 1, 4 or 8 of them. The first stage's blocks take
  # 1 + 4 + 4 (shortcut), then 4 + 4; a later stage's 8 + 4 + 8, then 4 + 4.
  ones = (9 + 2 * 8) + (20 + 3 * 8) + (20 + 5 * 8) + (20 + 2 * 8)
  assert counts['1x1 convolution', 'forward'] == ones * unit
  assert counts['3x3 convolution', 'forward'] == 16 * 9 * unit
  stem = 2 * 2 * 112 * 112 * 7 * 7 * 3 * 64
  assert counts['7x7 stem', 'forward'] == stem
  assert counts['7x7 stem', 'weight gradient'] == stem
  assert ('7x7 stem', 'input gradient') not in counts
  head = 2 * 2 * 2048 * 1000
  assert counts['head', 'forward'] == head
  assert counts['head', 'backward'] == 2 * head
  for size in ('1x1', '3x3'):
    kind = f'{size} convolution'
    assert counts[kind, 'input gradient'] == counts[kind, 'forward']
    assert counts[kind, 'weight gradient'] == counts[kind, 'forward']
  forward = sum(n for (_, kind), n in counts.items() if kind == 'forward')
  # torchvision states 4.09 G multiply-adds an image for this model.
  assert round(forward / 2 / 2 / 1e9, 2) == 4.09


@pytest.mark.slow
@pytest.mark.soak
def test_a_table_of_a_whole_step():
  """The tiny recipe, as a person types it."""
  command = [
    sys.executable,
    '-m',
    'scripts.bench.layers',
    '--config',
    'configs/resnet_anp.py:tiny',
    '--model=resnet18',
    '--width=8',
    '--size=32',
    '--batch=8',
    '--steps=2',
    '--top=3',
  ]
  done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
  ratios = json.loads(done.stdout.splitlines()[-1])
  shares = {k.removeprefix('share_'): v for k, v in ratios.items() if k.startswith('share_')}
  # Each is rounded to four digits.
  assert sum(shares.values()) == pytest.approx(1, abs=1e-4 * len(shares))
  assert all(v >= 0 for v in shares.values())
  for kind in (
    '7x7_stem_forward',
    '7x7_stem_weight_gradient',
    '3x3_convolution_forward',
    '3x3_convolution_weight_gradient',
    'norm_backward',
    'max_pool_forward',
    'update',
  ):
    assert shares[kind] > 0, kind
  # Half the time or more is known: the rest is the host's, between many
  # instructions of microseconds.
  assert shares['no_instruction_running'] < 0.5
  assert shares.get('other', 0) < 0.1
  assert 0 < ratios['flops_of_peak_step'] < 1


@pytest.mark.soak
def test_layers_are_timed_with_parts_of_a_batch():
  command = [
    sys.executable,
    '-m',
    'scripts.bench.layers',
    '--model=lenet',
    '--size=28',
    '--batch=64',
    '--shares=1,8',
    '--rounds=2',
    '--steps=2',
  ]
  done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  ratios = json.loads(done.stdout.splitlines()[-1])
  for layer in ('conv1', 'conv2', 'hidden', 'head', 'update'):
    assert ratios[f'{layer}_8_alone'] > 0
  # A convolution of 64 images is no match for one of 8, on any machine.
  assert ratios['conv2_8_alone'] > 1.5


@pytest.mark.slow
def test_it_runs_as_a_file_too():
  command = [sys.executable, 'scripts/bench/layers.py', '--help']
  done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
  assert '--batch' in done.stdout
