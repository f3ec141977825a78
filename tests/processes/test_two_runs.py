"""Two runs in one workdir, of launchers that know nothing of each other."""

import json

import pytest

from anp_jax.cluster import workdir_lock
from tests import launching, serving

pytestmark = pytest.mark.multiprocess


def _tree(folder):
  """Path and content of each file that a run of a workdir decides about."""
  names = 'config.json', 'labels.json'
  return {name: (folder / name).read_bytes() for name in names}


def test_one_ends_before_it_touches_anything_and_the_other_as_if_alone(tmp_path):
  keys = {'duration': '40 steps', 'checkpoint.every': '1 steps'}
  launching.run(tmp_path / 'a', 1, launching.arguments(tmp_path / 'alone', **keys))
  workdir = tmp_path / 'run'
  arguments = launching.arguments(workdir, **keys)
  with launching.Ranks(tmp_path / 'b', 1, arguments) as first:
    launching.wait_until((workdir / 'labels.json').exists, 90, first.text)
    holder = json.loads((workdir / workdir_lock.NAME).read_text())
    before = _tree(workdir)
    # A run of two processes too, and one with another config is another.
    more = launching.arguments(workdir, **{**keys, 'seed': '7'})
    texts = launching.ended(tmp_path / 'c', [2, 2], more)
    assert f'in use by process {holder["process"]} on ' in texts[0]
    assert _tree(workdir) == before
    assert first.processes[0].poll() is None, 'it ended before the second began'
    first.ends(0)
  serving.same_bits(launching.weights(workdir), launching.weights(tmp_path / 'alone'))
  assert not (workdir / workdir_lock.NAME).exists()
