"""A checkpoint's own metadata: what a changed bit of them leads to."""

import hashlib
import json

import jax
import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.checkpoint import manager, trained
from anp_jax.parallel import mesh as mesh_lib

_DATA = {'examples': 64, 'classes': 12, 'names': 'abc'}
_FILE = 'meta/metadata'


@pytest.fixture
def config():
  return config_lib.base()


def _state(step):
  sharding = jax.NamedSharding(_mesh(), mesh_lib.P())
  return jax.device_put({'step': np.int32(step)}, sharding)


def _mesh():
  return mesh_lib.create(config_lib.base(), jax.devices()[:1])


def _open(workdir, config):
  abstract_state = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _state(0)
  )
  return manager.Checkpoints(str(workdir), config, _DATA, abstract_state)


def _write(workdir, config, steps):
  checkpoints = _open(workdir, config)
  for step in steps:
    checkpoints.save(step, _state(step))
  checkpoints.close()


def _newest_meta(workdir):
  return workdir / 'checkpoints/2' / _FILE


def _bits(size, count=12):
  """(byte, bit) pairs over the whole of a file, each bit's number in turn."""
  return [(int(b), i % 8) for i, b in enumerate(np.linspace(0, size - 1, count))]


def test_a_changed_bit_of_the_metadata_is_damage(tmp_path, config, caplog):
  for case in range(12):
    workdir = tmp_path / str(case)
    _write(workdir, config, [1, 2])
    path = _newest_meta(workdir)
    data = bytearray(path.read_bytes())
    before = json.loads(data)
    byte, bit = _bits(len(data))[case]
    data[byte] ^= 1 << bit
    path.write_bytes(bytes(data))
    try:
      is_harmless = json.loads(data) == before  # a space, say
    except ValueError:
      is_harmless = False
    checkpoints = _open(workdir, config)
    state, step = checkpoints.restore()
    assert step == (2 if is_harmless else 1), (byte, bit)
    assert int(state['step']) == step
    assert checkpoints.changes() == {}
    checkpoints.close()
    assert (workdir / 'damaged').exists() != is_harmless
  assert 'checkpoint 2 is damaged' in caplog.text


@pytest.mark.parametrize(
  'old, new',
  [
    ('"examples": 64', '"examples": 65'),
    ('"optimizer.learning_rate": ', '"optimizer.learning_rate": 1'),
    ('"checksum"', '"checksun"'),
    ('"packages"', '"packaget"'),
  ],
)
def test_changed_values_are_damage_and_no_change(tmp_path, config, caplog, old, new):
  _write(tmp_path, config, [1, 2])
  path = _newest_meta(tmp_path)
  text = json.dumps(json.loads(path.read_text()))
  assert old in text
  path.write_text(text.replace(old, new))
  checkpoints = _open(tmp_path, config)
  _, step = checkpoints.restore()
  checkpoints.close()
  assert step == 1
  assert checkpoints.changes() == {}
  assert 'its metadata' in caplog.text


def test_the_checksum_is_the_sha256_of_the_sorted_values(tmp_path, config):
  _write(tmp_path, config, [2])
  meta = json.loads(_newest_meta(tmp_path).read_text())
  checksum = meta.pop('checksum')
  text = json.dumps(meta, sort_keys=True)
  assert checksum == hashlib.sha256(text.encode()).hexdigest()


def test_metadata_without_a_checksum_are_those_of_an_older_version(tmp_path, config):
  _write(tmp_path, config, [1, 2])
  path = _newest_meta(tmp_path)
  meta = json.loads(path.read_text())
  del meta['checksum']
  path.write_text(json.dumps(meta))
  checkpoints = _open(tmp_path, config)
  _, step = checkpoints.restore()
  checkpoints.close()
  assert step == 2


def test_prediction_refuses_changed_metadata(tmp_path, config):
  _write(tmp_path, config, [2])
  path = _newest_meta(tmp_path)
  meta = json.loads(path.read_text())
  meta['config']['model.width'] = 1
  path.write_text(json.dumps(meta))
  with pytest.raises(config_lib.ConfigError, match='its metadata'):
    trained.load(str(tmp_path))
