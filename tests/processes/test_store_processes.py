"""Tests of several processes whose workdir lies in an object store."""

import pytest

from tests import gcs_server, launching

pytestmark = pytest.mark.multiprocess
_SECRET = {'ANP_RUN_SECRET': 'ab' * 32}


@pytest.mark.slow
def test_processes_train_and_resume_in_a_store(gcs, tmp_path):
  def run(workdir, steps):
    return launching.run(
      tmp_path / 'logs',
      2,
      launching.arguments(workdir, duration=f'{steps} steps'),
      environment=_SECRET,
    )

  address = f'gs://{gcs_server.BUCKET}/processes'
  run(address, 4)
  run(tmp_path / 'local', 4)
  local = launching.weights(tmp_path / 'local')
  remote = launching.weights(gcs.write_files('processes', tmp_path / 'store'))
  assert local.keys() == remote.keys()
  for name, value in local.items():
    assert value.tobytes() == remote[name].tobytes(), name
  text = run(address, 8)[0]
  assert 'continuing from step 4 of 8' in text
  # Each process has a mirror: all of them see the config that one writes.
  text = launching.run(
    tmp_path / 'logs',
    2,
    launching.arguments(
      address,
      '--change=optimizer.learning_rate',
      **{'duration': '10 steps', 'optimizer.learning_rate': '0.01'},
    ),
    environment=_SECRET,
  )[0]
  assert 'config.optimizer.learning_rate=0.01 from step 8 on' in text
  assert f'report: {address}/report' in text
  assert not [n for n in gcs.objects if '.seen-by-all' in n]
