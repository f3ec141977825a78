"""oneDNN on this machine, for the tests that need it."""

import pytest

from anp_jax.system import onednn

needed = pytest.mark.skipif(onednn.find() is None, reason=f'no oneDNN: {onednn.missing_reason()}')
_BFLOAT16 = onednn.find() and 'bfloat16' in onednn.find().dtypes
DTYPES = ('float32', 'bfloat16') if _BFLOAT16 else ('float32',)


def calls(program, *arguments) -> int:
  """Returns how often a program calls oneDNN."""
  return program.lower(*arguments).as_text().count('custom_call @anp_onednn')
