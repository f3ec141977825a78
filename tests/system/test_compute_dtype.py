"""config.model.dtype='auto' becomes a dtype, once a run."""

import json
import types

import jax
import pytest

from anp_jax import config as config_lib
from anp_jax.system import compute_dtype
from tests import builders


@pytest.mark.parametrize(
  'keys, host, saved, dtype',
  [
    ({}, ('gpu', None), '', 'bfloat16'),
    ({}, ('tpu', None), '', 'bfloat16'),
    ({}, ('cpu', None), '', 'float32'),
    ({}, ('cpu', ('float32',)), '', 'float32'),
    ({}, ('cpu', ('float32', 'bfloat16')), '', 'bfloat16'),
    ({'model.cpu_library': 'xla'}, ('cpu', ('float32', 'bfloat16')), '', 'float32'),
    ({}, ('cpu', None), 'bfloat16', 'bfloat16'),  # a resumed run
    ({'model.dtype': 'float32'}, ('gpu', None), '', 'float32'),
  ],
)
def test_auto_is_the_faster_dtype(tmp_path, monkeypatch, keys, host, saved, dtype):
  platform, dtypes = host
  library = dtypes and types.SimpleNamespace(dtypes=dtypes)
  monkeypatch.setattr(compute_dtype.xla_flags, 'platform', lambda: platform)
  monkeypatch.setattr(compute_dtype.onednn, 'find', lambda: library)
  config = builders.config({'model.dtype': 'auto', **keys})
  if saved:
    flat = config_lib.flat(config) | {'model.dtype': saved}
    (tmp_path / 'config.json').write_text(json.dumps(flat))
  assert compute_dtype.decide(config, str(tmp_path)).model.dtype == dtype
  other = 'tpu' if platform == 'cpu' else 'cpu'  # where it is only compiled
  monkeypatch.setattr(compute_dtype.xla_flags, 'platform', lambda: other)
  assert compute_dtype.decide(config, str(tmp_path), platform).model.dtype == dtype


@pytest.mark.parametrize('key', ['model.dtype', 'model.param_dtype', 'strategy.reduce_dtype'])
def test_float64_needs_the_setting_of_jax(tmp_path, key):
  config = builders.config({key: 'float64'})
  words = f"config.{key}='float64': expected the environment variable JAX_ENABLE_X64=1"
  builders.assert_refused([words], compute_dtype.decide, config, str(tmp_path))
  with jax.enable_x64(True):
    assert compute_dtype.decide(config, str(tmp_path)) == config
