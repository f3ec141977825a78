"""Programs of a station: models with the same text share one."""

import jax

from anp_jax.runtimes.model_ring import compiled as programs_lib


def test_programs_of_models_that_left_are_released():
  def alive():
    return len(jax.devices()[0].client.live_executables())

  programs, x = programs_lib.Programs(), jax.ShapeDtypeStruct((3,), 'float32')
  before, functions = alive(), []
  # 0 and 1 have the same text, like models that differ in their seed.
  for model, factor in ((0, 2.0), (1, 2.0), (2, 3.0)):
    functions.append(jax.jit(lambda x, f=factor: x * f))
    programs.get(model, functions[-1], x)
  assert alive() == before + 2
  for model, left in ((0, 2), (2, 1), (1, 0)):
    programs.release(model)
    functions[model].clear_cache()
    assert alive() == before + left
