"""Tests of urls: addresses, and one line for those that will not do."""

import importlib
import os
import sys
import tempfile

import pytest

from anp_jax import __main__ as main
from anp_jax.config import command_line, urls
from anp_jax.data.prepare import __main__ as prepare
from tests import builders


@pytest.fixture(autouse=True)
def no_mirror(tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  urls.root.cache_clear()
  yield
  urls.root.cache_clear()


@pytest.mark.parametrize('address', ['gs://b', 'gs://b/runs/one', 's3://b/x'])
def test_path_in_a_mirror_tells_its_address(address):
  folder = urls.mirror(address + '//')
  assert urls.normalize(address.replace('/runs', '//./runs')) == address
  assert os.path.isabs(folder)
  assert urls.is_mirror(folder)
  assert urls.remote_url(folder) == address
  assert urls.remote_url(os.path.join(folder, 'a', 'b')) == f'{address}/a/b'
  assert urls.remote_url(f'see {folder}/a, {folder}') == f'see {address}/a, {address}'


def test_paths_of_this_machine_stay_what_they_are(tmp_path):
  urls.mirror('gs://bucket')
  for path in ('runs/demo', str(tmp_path), ''):
    assert urls.mirror(path) == path
    assert urls.remote_url(path) == path
    urls.check('--workdir', path)


@pytest.mark.parametrize(
  'arguments, words',
  [
    (['--workdir=gcs://b/run'], ["--workdir='gcs://b/run'", "'gs'"]),
    (['--workdir=s3://b/run'], ['Orbax', 's3', 'gs://BUCKET/FOLDER', 'data']),
    (['--workdir=gs://'], ["--workdir='gs://'", 'gs://BUCKET/FOLDER']),
    (
      ['--config.data.path=s4://b/set', '--config.data.source=arrays'],
      ["config.data.path='s4://b/set'", 's3://BUCKET/FOLDER'],
    ),
    (['--config.data.dir=http://b/sets'], ["config.data.dir='http://b/sets'"]),
    (
      ['--from=photos', '--name=a', '--data_dir=gs://b/sets'],
      ["--data_dir='gs://b/sets': expected a path of"],
    ),
  ],
)
def test_other_addresses_are_one_line(arguments, words, capsys):
  if '--name=a' in arguments:
    assert prepare.main(['prepare', *arguments]) == 2
  else:
    assert main.main(['main.py', '--config=configs/resnet_anp.py:tiny', *arguments]) == 2
  builders.error_line(capsys, *words)


@pytest.mark.parametrize('package, address', [('gcsfs', 'gs://b/run'), ('s3fs', 's3://b/set')])
def test_missing_package_is_named(package, address, monkeypatch):
  from anp_jax.system import remote

  registry = importlib.import_module('fsspec.registry')
  scheme = address[:2]
  monkeypatch.setitem(sys.modules, package, None)  # as if it were missing
  monkeypatch.delitem(registry._registry, scheme, raising=False)
  line = builders.refusal(remote.sizes, address)
  assert line == (
    f"{address}: needs the package {package}, which is not installed: pip install '.[{scheme}]'"
  )


@pytest.mark.parametrize(
  'keys, line',
  [
    (
      {'strategy.name': 'parameter_server'},
      '^--workdir=.gs://bucket/photos/run.: expected a path.*strategy parameter_server',
    ),
    (
      {'strategy.name': 'model_ring', 'strategy.models': "('seed=1', 'seed=2')"},
      '^--workdir=.gs://bucket/photos/run.: expected a path.*strategy model_ring',
    ),
    (
      {'ensemble.seeds': '0:2'},
      '^--workdir=.gs://bucket/photos/run.: expected a path.*for ensemble.seeds',
    ),
    # It lies apart from its data.
    ({'data.source': 'folder', 'data.path': 'gs://bucket/photos/'}, 'is inside config.data.path'),
  ],
)
def test_workdirs_that_cannot_be_in_a_store(keys, line):
  flags = [
    '--config=configs/resnet_anp.py:tiny',
    f'--workdir={urls.mirror("gs://bucket/photos/run")}',
  ]
  builders.assert_refused(line, command_line.from_flags, command_line.main_flags(flags, ''), keys)
