"""The benchmark of compiled programs' sizes: its counts, and a run of it for a CPU."""

import json
import math

import pytest

from scripts.bench.once import hlo
from tests import launching

# A fusion within a fusion, and a library's call: the entry has two kernels.
_TEXT = """HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[]}

%inner (a: f32[]) -> f32[] {
  ROOT %a = f32[] parameter(0)
}

%outer (b: f32[]) -> (f32[], f32[]) {
  %b = f32[] parameter(0)
  %c = f32[] fusion(%b), kind=kLoop, calls=%inner
  ROOT %d = (f32[], f32[]) tuple(%b, %c)
}

ENTRY %main.1 (e: f32[]) -> f32[] {
  %e = f32[] parameter(0)
  %f = (f32[], f32[]) fusion(%e), kind=kLoop, calls=%outer, metadata={op_name="jit(f)/fusion"}
  %g = f32[] get-tuple-element(%f), index=0
  ROOT %h = f32[] custom-call(%g), custom_call_target="__cudnn$convForward"
}
"""


def test_instructions_of_all_computations_and_kernels_of_the_entry():
  assert hlo.sizes(_TEXT) == (1 + 3 + 4, 2)


@pytest.mark.slow
def test_a_run_ends_with_finite_ratios():
  words = '-m', 'scripts.bench.once.hlo', '--case=tiny', '--target=cpu:1', '--rounds=1'
  done = launching.python(*words, status=0)
  ratios = json.loads(done.stdout.splitlines()[-1])
  figures = 'instructions', 'kernels', 'trace_seconds', 'compile_seconds'
  assert {f'tiny_{c}_{f}_over_flax' for c in ('step', 'layers') for f in figures} == set(ratios)
  assert all(map(math.isfinite, ratios.values()))
  # A step that also counts metrics is no smaller.
  assert (
    ratios['tiny_step_instructions_over_flax'] > ratios['tiny_layers_instructions_over_flax'] > 0
  )
