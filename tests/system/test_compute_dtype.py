"""config.model.dtype='auto' becomes a dtype, once a run."""

import json
import types

import pytest

from anp_jax import config as config_lib
from anp_jax.system import compute_dtype
from tests import builders

_TINY = 'configs/resnet_anp.py:tiny'


@pytest.fixture
def config():
  return builders.load(_TINY, {'model.dtype': 'auto'})


def _decided(config, workdir, monkeypatch, platform, dtypes):
  library = dtypes and types.SimpleNamespace(dtypes=dtypes)
  monkeypatch.setattr(compute_dtype.xla_flags, 'platform', lambda: platform)
  monkeypatch.setattr(compute_dtype.onednn, 'find', lambda: library)
  return compute_dtype.decide(config, str(workdir)).model.dtype


@pytest.mark.parametrize(
  'platform, dtypes, dtype',
  [
    ('gpu', None, 'bfloat16'),
    ('tpu', None, 'bfloat16'),
    ('cpu', None, 'float32'),
    ('cpu', ('float32',), 'float32'),
    ('cpu', ('float32', 'bfloat16'), 'bfloat16'),
  ],
)
def test_auto_is_the_faster_dtype(config, tmp_path, monkeypatch, platform, dtypes, dtype):
  assert _decided(config, tmp_path, monkeypatch, platform, dtypes) == dtype


def test_a_cpu_without_onednn_computes_in_float32(tmp_path, monkeypatch):
  keys = {'model.dtype': 'auto', 'model.cpu_library': 'xla'}
  config = builders.load(_TINY, keys)
  dtypes = ('float32', 'bfloat16')
  assert _decided(config, tmp_path, monkeypatch, 'cpu', dtypes) == 'float32'


def test_a_resumed_run_keeps_its_dtype(config, tmp_path, monkeypatch):
  saved = builders.load(_TINY, {'model.dtype': 'bfloat16'})
  (tmp_path / 'config.json').write_text(json.dumps(config_lib.flat(saved)))
  assert _decided(config, tmp_path, monkeypatch, 'cpu', None) == 'bfloat16'


def test_a_dtype_that_is_named_stays(tmp_path, monkeypatch):
  config = builders.load(_TINY, {'model.dtype': 'float32'})
  assert _decided(config, tmp_path, monkeypatch, 'gpu', None) == 'float32'
