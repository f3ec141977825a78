"""A checkpoint's own metadata: what a changed bit of them leads to."""

import contextlib
import hashlib
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from anp_jax import config as config_lib
from anp_jax.checkpoint import manager, trained
from anp_jax.parallel import mesh as mesh_lib

_DATA = {'examples': 64, 'classes': 12, 'names': 'abc'}
_NEWEST = 'checkpoints/2/meta/metadata'


_SHARDING = jax.NamedSharding(mesh_lib.create(config_lib.base(), jax.devices()[:1]), mesh_lib.P())


def _open(workdir, config):
  abstract_state = {'step': jax.ShapeDtypeStruct((), np.int32, sharding=_SHARDING)}
  return manager.Checkpoints(str(workdir), config, _DATA, abstract_state)


def _restored(workdir, config):
  """The step that is restored, once the run goes on as it was."""
  with contextlib.closing(_open(workdir, config)) as checkpoints:
    state, step = checkpoints.restore()
    assert int(state['step']) == step and checkpoints.changes() == {}
  return step


@pytest.fixture
def config():
  return config_lib.base()


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """A workdir with checkpoints of steps 1 and 2."""
  workdir = tmp_path_factory.mktemp('written')
  with contextlib.closing(_open(workdir, config_lib.base())) as checkpoints:
    for step in (1, 2):
      checkpoints.save(step, jax.device_put({'step': np.int32(step)}, _SHARDING))
  return workdir


@pytest.fixture
def workdir(written, tmp_path):
  """A copy of that workdir."""
  return pathlib.Path(shutil.copytree(written, tmp_path / 'run'))


@pytest.mark.parametrize('case', range(6))
def test_a_changed_bit_of_the_metadata_is_damage(workdir, config, caplog, case):
  path = workdir / _NEWEST
  data = bytearray(path.read_bytes())
  before = json.loads(data)
  data[case * (len(data) - 1) // 5] ^= 1 << case
  path.write_bytes(bytes(data))
  try:
    is_harmless = json.loads(data) == before  # a space, say
  except ValueError:
    is_harmless = False
  assert _restored(workdir, config) == (2 if is_harmless else 1)
  assert (workdir / 'damaged').exists() != is_harmless
  assert ('checkpoint 2 is damaged' in caplog.text) != is_harmless


@pytest.mark.parametrize(
  'old, new',
  [
    ('"examples": 64', '"examples": 65'),
    ('"optimizer.learning_rate": ', '"optimizer.learning_rate": 1'),
    ('"checksum"', '"checksun"'),
    ('"packages"', '"packaget"'),
  ],
)
def test_changed_values_are_damage_and_no_change(workdir, config, caplog, old, new):
  path = workdir / _NEWEST
  text = json.dumps(json.loads(path.read_text()))
  assert old in text
  path.write_text(text.replace(old, new))
  with pytest.raises(config_lib.ConfigError, match='its metadata'):  # prediction
    trained.load(str(workdir))
  assert _restored(workdir, config) == 1
  assert 'its metadata' in caplog.text


def test_the_checksum_is_the_sha256_of_the_sorted_values(written):
  meta = json.loads((written / _NEWEST).read_text())
  checksum = meta.pop('checksum')
  text = json.dumps(meta, sort_keys=True)
  assert checksum == hashlib.sha256(text.encode()).hexdigest()
  assert meta['packages']['jax'] == jax.__version__ and meta['data'] == _DATA
  assert meta['config']['model.name'] == 'resnet50'
