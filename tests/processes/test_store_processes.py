"""Tests of several processes whose workdir lies in an object store."""

import pytest

from tests import gcs_server, launching

pytestmark = pytest.mark.multiprocess
_SECRET = {'ANP_RUN_SECRET': 'ab' * 32}


@pytest.mark.slow
def test_processes_train_and_resume_in_a_store(gcs, tmp_path):
  """Each process has a mirror: all of them see the config that one writes."""
  address = f'gs://{gcs_server.BUCKET}/processes'

  def run(*more, **keys):
    arguments = launching.arguments(address, *more, **keys)
    return launching.run(tmp_path, 2, arguments, environment=_SECRET)[0]

  run(duration='4 steps')
  keys = {'duration': '6 steps', 'optimizer.learning_rate': '0.01'}
  text = run('--change=optimizer.learning_rate', **keys)
  assert 'continuing from step 4 of 6' in text
  assert 'config.optimizer.learning_rate=0.01 from step 4 on' in text
  assert f'report: {address}/report' in text
  assert not [n for n in gcs.objects if '.seen-by-all' in n]
  assert b'ended' in gcs.objects['processes/members.json']  # else a late --join waits
