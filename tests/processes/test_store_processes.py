"""Tests of several processes whose workdir lies in an object store."""

import pytest

from tests import gcs_server
from tests import launching

pytestmark = pytest.mark.multiprocess


def test_processes_train_and_resume_in_a_store(gcs, tmp_path):
  address = f'gs://{gcs_server.BUCKET}/processes'
  for workdir, lengths in ((address, (4, 8)), (tmp_path / 'local', (8,))):
    for steps in lengths:
      texts = launching.run(
        tmp_path / 'logs', 2, launching.arguments(
          workdir, duration=f'{steps} steps', **{'checkpoint.every': '4 steps'}
        ),
      )  # fmt: skip
    if workdir == address:
      assert 'continuing from step 4 of 8' in texts[0]
      assert f'report: {address}/report' in texts[0]
  folder = gcs.write_files('processes', tmp_path / 'store')
  local = launching.weights(tmp_path / 'local')
  remote = launching.weights(folder)
  assert local.keys() == remote.keys()
  for name, value in local.items():
    assert value.tobytes() == remote[name].tobytes(), name
  assert not [n for n in gcs.objects if '.seen-by-all' in n]
