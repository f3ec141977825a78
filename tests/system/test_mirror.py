"""Tests of mirror: a workdir's small files, kept in step with a store."""

import os
import tempfile
import threading

import pytest

from anp_jax.config import urls
from anp_jax.system import mirror, remote
from tests import builders, gcs_server, launching

_ADDRESS = f'gs://{gcs_server.BUCKET}/mirror'


@pytest.fixture
def store(gcs, tmp_path, monkeypatch):
  """The stand-in, without objects of this name; and no mirror."""
  mirror.remove()
  urls.root.cache_clear()
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  for name in [n for n in gcs.objects if n.startswith('mirror/')]:
    gcs.remove(name)
  return gcs


def _objects(store):
  return {
    name.removeprefix('mirror/'): content
    for name, content in store.objects.items()
    if name.startswith('mirror/')
  }


def _write(folder, name, text):
  path = os.path.join(folder, name)
  os.makedirs(os.path.dirname(path), exist_ok=True)
  with open(path, 'a') as file:
    file.write(text)


def test_files_go_up_and_come_down_on_another_machine(store):
  folder = mirror.fetch(_ADDRESS)
  assert not os.path.exists(folder)
  _write(folder, 'metrics.jsonl', '{"step": 1}\n')
  _write(folder, 'report/index.html', 'é')
  _write(folder, '.config.json.0123', 'a draft')
  mirror.upload(folder)
  assert _objects(store) == {'metrics.jsonl': b'{"step": 1}\n', 'report/index.html': 'é'.encode()}
  mirror.remove()
  assert not os.path.exists(folder)
  urls.root.cache_clear()
  other = mirror.fetch(_ADDRESS + '/')
  assert other != folder
  with open(os.path.join(other, 'report/index.html'), encoding='utf-8') as file:
    assert file.read() == 'é'


def test_a_restart_in_place_has_the_same_folder(store, monkeypatch):
  """An elastic run restarts often: each program would leave a folder of its own."""
  folder = mirror.fetch(_ADDRESS)
  for name, value in urls.inherited().items():
    monkeypatch.setenv(name, value)
  urls.root.cache_clear()  # as in the next program
  assert mirror.fetch(_ADDRESS) == folder
  urls.root.cache_clear()
  assert urls.inherited() == {}
  assert mirror.fetch(_ADDRESS) != folder  # nor does its child


def test_only_what_changed_is_uploaded(store):
  for name in ('a.txt', 'b.txt', 'stopped.json'):
    store.put(f'mirror/{name}', b'1')
  folder = mirror.fetch(_ADDRESS)
  # A run on another machine, whose lines must stay.
  store.put('mirror/a.txt', b'newer')
  _write(folder, 'b.txt', '2')
  _write(folder, 'c.txt', '3')
  os.remove(os.path.join(folder, 'stopped.json'))
  mirror.begin_upload(folder)
  mirror.upload(folder)
  assert _objects(store) == {'a.txt': b'newer', 'b.txt': b'12', 'c.txt': b'3'}
  requests = len(store.requests)
  mirror.upload(folder)
  assert len(store.requests) == requests


def test_checkpoints_stay_in_the_store(store):
  for step, last in ((3, 'commit_success.txt'), (4, 'meta')):
    for name in ('state/d/1', last):
      store.put(f'mirror/checkpoints/{step}/{name}', b'x')
  store.put('mirror/best/2/commit_success.txt', b'x')
  store.put('mirror/best/2/metrics/metrics', b'{"loss": 1}')
  store.put('mirror/damaged/1/state/d/1', b'x')
  folder = mirror.fetch(_ADDRESS)
  files = [
    os.path.relpath(os.path.join(path, name), folder)
    for path, _, names in os.walk(folder)
    for name in names
  ]
  assert files == ['best/2/metrics/metrics']
  # One that was not committed is none.
  assert os.listdir(os.path.join(folder, 'checkpoints')) == ['3']
  before = _objects(store)
  mirror.upload(folder)
  assert _objects(store) == before


def test_store_that_fails_loses_nothing(store, monkeypatch, caplog):
  folder = mirror.fetch(_ADDRESS)
  _write(folder, 'a.txt', '1')
  file_system = remote.file_system(_ADDRESS)
  with monkeypatch.context() as patch:
    patch.setattr(file_system, 'pipe_file', lambda *_: 1 / 0)
    mirror.begin_upload(folder)
    with pytest.raises(mirror.UploadError, match='a.txt could not be upload'):
      mirror.upload(folder)
    assert f'{_ADDRESS}: a.txt could not be uploaded' in caplog.text
  mirror.remove()
  assert os.listdir(folder) == ['a.txt']


def test_uploads_in_the_background_wait_for_nobody_and_none_is_lost(store, monkeypatch):
  """A checkpoint begins one; one that failed is made up for by the next."""
  folder = mirror.fetch(_ADDRESS)
  _write(folder, 'a.txt', '1')
  tried, may_answer, put = threading.Event(), threading.Event(), store.put
  file_system = remote.file_system(_ADDRESS)
  with monkeypatch.context() as patch:
    patch.setattr(file_system, 'pipe_file', lambda *_: tried.set() or 1 / 0)
    mirror.begin_upload(folder)
    assert tried.wait(10)
  with monkeypatch.context() as patch:
    patch.setattr(store, 'put', lambda *item: (may_answer.wait(20), put(*item)))
    mirror.begin_upload(folder)
    assert not _objects(store)
    may_answer.set()
    mirror.upload(folder)
  assert _objects(store) == {'a.txt': b'1'}
  for text in ('12', '123'):
    _write(folder, 'a.txt', text[-1])
    want = {'a.txt': text.encode()}
    launching.wait_until(lambda w=want: mirror.begin_upload(folder) or _objects(store) == w, 10)
  mirror.upload(folder)
  mirror.remove()
  assert not os.path.exists(folder)  # nothing is missing in the store


@pytest.mark.parametrize('text, nanoseconds', [('2', 1), ('12', 0)])
def test_a_change_of_size_or_time_alone_is_uploaded(store, text, nanoseconds):
  """A counter in a file goes from 1 to 2; two writes are within a tick of the clock."""
  store.put('mirror/a.txt', b'1')
  folder = mirror.fetch(_ADDRESS)
  path = os.path.join(folder, 'a.txt')
  time_ns = os.stat(path).st_mtime_ns + nanoseconds
  with open(path, 'w') as file:
    file.write(text)
  os.utime(path, ns=(time_ns, time_ns))
  mirror.upload(folder)
  assert _objects(store) == {'a.txt': text.encode()}


def test_bucket_that_is_not_there_is_one_line(gcs):
  line = builders.refusal(mirror.fetch, 'gs://no-such-bucket/run')
  assert line.startswith('gs://no-such-bucket/run cannot be read: ')


def test_local_workdir_is_left_alone(tmp_path):
  assert mirror.fetch(str(tmp_path)) == str(tmp_path)
  mirror.upload(str(tmp_path))
  mirror.begin_upload(str(tmp_path))
