"""Tests of reading a compiled program's text."""

from anp_jax.tools.portability import compiled_program

# As XLA writes them: tuples with index comments, layouts with tiles, quotes in op_names.
_TEXT = r"""HloModule jit_train_step, is_scheduled=true, entry_computation_layout={()->f32[]}

%fused_dot (p0: f32[72,16], p1: f32[16,72]) -> f32[72,72] {
  %p0 = f32[72,16]{1,0} parameter(0)
  %p1 = f32[16,72]{1,0:T(8,128)} parameter(1)
  %dot.9 = f32[72,72]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %negate.1 = f32[72,72]{1,0} negate(%dot.9), metadata={op_name="jit(f)/neg"}
}

%body (t: (s32[], f32[72,72])) -> (s32[], f32[72,72]) {
  %t = (s32[], f32[72,72]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[72,72]{1,0} get-tuple-element(%t), index=1
  ROOT %tuple.1 = (s32[], f32[72,72]{1,0}) tuple(%i, %x)
}

%condition (u: (s32[], f32[72,72])) -> pred[] {
  %u = (s32[], f32[72,72]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main.9 (a: f32[72,16], b: f32[16,72]) -> (f32[72,72], /*index=1*/f32[72,72]) {
  %a = f32[72,16]{1,0} parameter(0), metadata={op_name="batch[\'image\']/x"}
  %b = f32[16,72]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %fusion.1 = f32[72,72]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused_dot
  %before = (s32[], f32[72,72]{1,0}) tuple(%zero, %fusion.1)
  %while.1 = (s32[], f32[72,72]{1,0}) while(%before), condition=%condition, body=%body
  %after = f32[72,72]{1,0} get-tuple-element(%while.1), index=1
  %custom.1 = (f32[3,3,8,16]{3,2,1,0}, u8[16]{0}) custom-call(%a, %b), custom_call_target="__cudnn$convBackwardFilter"
  ROOT %out = (f32[72,72]{1,0}, /*index=1*/f32[72,72]{1,0}) tuple(%after, %fusion.1)
}
"""  # noqa: E501


def test_instructions_are_read():
  program = compiled_program.Program(_TEXT)
  fusion = program.instructions['fusion.1']
  assert (fusion.opcode, fusion.operands, fusion.called) == ('fusion', ('a', 'b'), ('fused_dot',))
  assert fusion.arrays == (('f32', (72, 72)),)
  assert [i.name for i in program.inside(fusion)] == ['p0', 'p1', 'dot.9', 'negate.1']
  loop = program.instructions['while.1']
  assert set(loop.called) == {'condition', 'body'}
  assert loop.arrays == (('s32', ()), ('f32', (72, 72)))
  assert program.caller(program.instructions['x']) is loop


def test_products_and_users():
  program = compiled_program.Program(_TEXT)
  names = program.instructions
  assert program.product(names['fusion.1']) is names['dot.9']
  assert program.product(names['custom.1']) is names['custom.1']
  assert program.product(names['while.1']) is None
  users = [i.name for i in program.users(names['fusion.1'], lambda _: True)]
  assert users == ['before', 'out', 'while.1', 'after']
  assert [i.name for i in program.users(names['before'], lambda _: False)] == ['while.1']
