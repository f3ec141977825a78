"""The secret of a run: who makes it, who may read it, what is derived."""

import os
import stat
import threading
from unittest import mock

import pytest

from anp_jax import config as config_lib
from anp_jax.cluster import secret
from tests import builders, coordinating

_TEXT = '0123456789abcdef' * 4


def test_all_processes_of_a_folder_read_one_secret(tmp_path):
  folder, secrets = str(tmp_path / 'new' / 'run'), []
  coordinating.at_once([lambda: secrets.append(secret.for_run(folder, {}))] * 16)
  assert len(secrets) == 16 and len(set(secrets)) == 1
  assert len(bytes.fromhex(secrets[0])) == 32
  assert os.listdir(folder) == [secret.NAME]  # no draft is left
  mode = os.stat(os.path.join(folder, secret.NAME)).st_mode
  assert stat.S_IMODE(mode) == 0o600
  # A run that resumes uses it again; another run has another.
  assert secret.for_run(folder, {}) == secrets[0]
  assert secret.for_run(str(tmp_path / 'other'), {}) != secrets[0]


def test_a_reader_makes_no_secret(tmp_path):
  words = ['cannot be read', 'No such file']
  builders.assert_refused(words, secret.for_run, str(tmp_path), {}, makes=False)
  assert not os.listdir(tmp_path)
  text = secret.for_run(str(tmp_path), {})
  assert secret.for_run(str(tmp_path), {}, makes=False) == text


@pytest.mark.parametrize('mode, other', [(0o640, 0), (0o604, 0), (0o600, 1)])
def test_a_file_that_others_may_read_is_no_secret(tmp_path, monkeypatch, mode, other):
  secret.for_run(str(tmp_path), {})
  (tmp_path / secret.NAME).chmod(mode)
  monkeypatch.setattr(os, 'geteuid', lambda: os.getuid() + other)
  builders.assert_refused(['others may know'], secret.for_run, str(tmp_path), {})


def test_a_link_is_not_followed(tmp_path, monkeypatch):
  monkeypatch.setattr(secret, '_APPEARS_WITHIN', 0.1)
  (tmp_path / 'elsewhere').write_text(_TEXT)
  (tmp_path / 'elsewhere').chmod(0o600)
  (tmp_path / secret.NAME).symlink_to(tmp_path / 'elsewhere')
  builders.assert_refused(['cannot be read'], secret.for_run, str(tmp_path), {})


@pytest.mark.parametrize('text', ['', 'short', _TEXT[:-1], _TEXT.upper()])
def test_a_file_that_holds_no_secret_is_named(tmp_path, monkeypatch, text):
  monkeypatch.setattr(secret, '_APPEARS_WITHIN', 0.1)
  path = tmp_path / secret.NAME
  path.write_text(text)
  path.chmod(0o600)
  builders.assert_refused(['is no secret'], secret.for_run, str(tmp_path), {})


@pytest.mark.parametrize('exists', [True, False], ids=['empty file', 'read-only folder'])
def test_a_text_that_appears_late_is_waited_for(tmp_path, monkeypatch, exists):
  """A host that cannot write is then named, see `shared_folder`."""

  def write():
    draft = tmp_path / 'draft'
    draft.write_text(_TEXT)
    draft.chmod(0o600)
    draft.rename(path)

  path = tmp_path / secret.NAME
  if exists:
    path.touch(0o600)
  create = mock.Mock(side_effect=OSError(30, 'Read-only file system'))
  monkeypatch.setattr(secret, '_create', create)
  timer = threading.Timer(0.1, write)
  timer.start()
  assert secret.for_run(str(tmp_path), {}) == _TEXT
  timer.join()


def test_a_folder_that_nobody_can_write_to_is_refused(tmp_path, monkeypatch):
  (tmp_path / 'file').touch()
  monkeypatch.setattr(secret, '_APPEARS_WITHIN', 0.1)
  with pytest.raises(config_lib.ConfigError, match='cannot be read or written there'):
    secret.for_run(str(tmp_path / 'file' / 'run'), {})


@pytest.mark.parametrize('text', ['', 'hunter2', _TEXT[:-1], _TEXT + '0', _TEXT.upper()])
def test_a_variable_that_holds_no_secret_is_refused(tmp_path, text):
  line = builders.refusal(secret.for_run, str(tmp_path), {secret.VARIABLE: text})
  assert secret.VARIABLE in line
  assert not text or text not in line  # logs are read by others


def test_the_variable_comes_before_the_file(tmp_path):
  assert secret.for_run(str(tmp_path), {secret.VARIABLE: _TEXT}) == _TEXT
  assert secret.for_run('gs://a/b', {secret.VARIABLE: _TEXT}) == _TEXT
  assert not os.listdir(tmp_path)


@pytest.mark.parametrize('workdir', ['', 'gs://bucket/run'])
def test_a_place_that_must_not_hold_a_secret_needs_the_variable(workdir):
  builders.assert_refused([secret.VARIABLE], secret.for_run, workdir, {})


def test_only_the_proof_of_the_same_texts_is_one():
  proof = secret.prove(_TEXT, 'newcomer', 'a', 'b')
  assert secret.is_proof(proof, _TEXT, 'newcomer', 'a', 'b')
  other = _TEXT[:-1] + '0'
  assert not secret.is_proof(proof, other, 'newcomer', 'a', 'b')
  assert not secret.is_proof(proof, _TEXT, 'coordinator', 'a', 'b')
  assert not secret.is_proof(proof, _TEXT, 'newcomer', 'b', 'a')
  for text in ('', proof[:-1], proof + '0', None, 5, 'é'):
    assert not secret.is_proof(text, _TEXT, 'newcomer', 'a', 'b')
