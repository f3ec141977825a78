"""Runs of several processes where the environment names a proxy."""

import pytest

from tests import launching

pytestmark = pytest.mark.multiprocess

_STRATEGIES = {
  'sync': {},
  'parameter_server': {
    'strategy.name': 'parameter_server',
    'model.name': 'tests.user_network:SmallNet',
    'data.image_size': '8',
    'data.resize': '8',
  },
}


@pytest.mark.parametrize('strategy', _STRATEGIES)
def test_a_run_asks_no_proxy(tmp_path, strategy):
  # Nobody listens there: whoever asks it is refused.
  proxy = f'http://127.0.0.1:{launching.free_port()}'
  names = 'http_proxy', 'https_proxy', 'grpc_proxy', 'all_proxy'
  environment = dict.fromkeys((*names, *map(str.upper, names)), proxy)
  clean = {name: '' for name in ('no_proxy', 'no_grpc_proxy', 'NO_PROXY')}
  keys = {'duration': '4 steps', 'cluster.rendezvous_timeout': '40', **_STRATEGIES[strategy]}
  texts = launching.run(
    tmp_path, 2, launching.arguments(tmp_path / 'run', **keys), environment={**environment, **clean}
  )
  assert 'error' not in ''.join(texts)
  assert any((tmp_path / 'run/checkpoints').iterdir())
