"""oneDNN on this machine, for the tests that need it."""

import jax
import pytest

from anp_jax.system import onednn
from anp_jax.system.onednn import library


@pytest.fixture(scope='module', autouse=True)
def wide_vectors():
  """With AVX2, too, oneDNN computes all that it does with AVX-512, in modules that name this."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(library.Library, 'is_wide', True)
    jax.clear_caches()  # traced layers have chosen
    yield
  jax.clear_caches()


needed = pytest.mark.skipif(onednn.find() is None, reason=f'no oneDNN: {onednn.missing_reason()}')
_BFLOAT16 = onednn.find() and 'bfloat16' in onednn.find().dtypes
DTYPES = ('float32', 'bfloat16') if _BFLOAT16 else ('float32',)


def calls(program, *arguments) -> int:
  """Returns how often a program calls oneDNN."""
  return program.lower(*arguments).as_text().count('custom_call @anp_onednn')
