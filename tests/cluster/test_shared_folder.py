"""A workdir that one of several processes does not see or cannot write to."""

from concurrent import futures
import errno
import os
import pathlib
import threading

import pytest

from anp_jax import config as config_lib
from anp_jax.cluster import shared_folder
from tests import coordinating


class _Mount(type(pathlib.Path())):
  """A folder as a process sees it that may read it only."""

  def write_text(self, *_, **__):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))


@pytest.fixture
def check(monkeypatch):
  """Checks what each process sees; returns each one's error, or ''."""
  here = threading.local()
  monkeypatch.setattr(shared_folder.remote, 'path', lambda _: here.folder)
  monkeypatch.setattr(shared_folder, '_SEEN_WITHIN', 0.1)

  def check_all(*folders, goes_on=False):
    values, barrier = [None] * len(folders), threading.Barrier(len(folders))

    def one(index):
      here.folder = folders[index]
      try:
        shared_folder.check('/w', coordinating.Gathering(index, values, barrier, goes_on))
      except config_lib.ConfigError as e:
        return str(e)
      return ''

    with futures.ThreadPoolExecutor(len(folders)) as pool:
      return list(pool.map(one, range(len(folders))))

  return check_all


def test_a_shared_folder_is_made_and_left_empty(check, tmp_path):
  folder = tmp_path / 'new' / 'run'
  assert check(folder, folder, folder) == ['', '', '']
  assert os.listdir(folder) == []


@pytest.mark.parametrize('rank', [0, 1, 2])
def test_a_node_that_cannot_write_is_named_by_all(check, tmp_path, rank):
  folders = [tmp_path] * 3
  folders[rank] = _Mount(tmp_path)
  texts = check(*folders)
  assert (
    texts
    == [
      f'--workdir=/w: rank {rank + 3} on node{rank} cannot write there: Read-only '
      'file system; all processes write checkpoints'
    ]
    * 3
  )
  assert os.listdir(tmp_path) == []


def test_a_folder_of_another_node_is_named_by_all(check, tmp_path):
  texts = check(tmp_path / 'a', tmp_path / 'a', tmp_path / 'b')
  assert texts[0].startswith(
    '--workdir=/w: rank 5 on node2 does not see what rank 3 on node0 wrote'
  )
  assert len(set(texts)) == 1
  assert os.listdir(tmp_path / 'a') == []


def test_in_a_run_that_goes_on_only_the_node_with_another_folder_ends(check, tmp_path):
  first, other = check(tmp_path / 'a', tmp_path / 'b', goes_on=True)
  assert not first and other.startswith('--workdir=/w: rank 4 on node1 does not see')
