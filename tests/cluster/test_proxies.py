"""What a run exempts from the proxies of a site."""

import socket

import pytest

from anp_jax.cluster import cluster_env, proxies

_NAMES = 'no_grpc_proxy', 'no_proxy', 'NO_PROXY'


def _bypass(coordinator='node1:61440', **environment):
  env = cluster_env.ClusterEnv('flags', 1, 2, coordinator)
  proxies.bypass(env, environment)
  return {name: environment[name].split(',') for name in _NAMES}


@pytest.mark.parametrize('name', _NAMES)
def test_the_hosts_of_a_run_are_exempt(name):
  hosts = _bypass()[name]
  local = 'localhost', '127.0.0.1', '::1', socket.gethostname()
  assert {'node1', *local} == set(hosts)


def test_an_address_of_ipv6_has_no_brackets():
  assert 'fd00::7' in _bypass('[fd00::7]:61440')['no_grpc_proxy']


@pytest.mark.parametrize(
  'environment', [{'no_proxy': 'a.org,b.org'}, {'NO_PROXY': 'a.org, b.org'}], ids=str
)
def test_what_was_exempt_stays_so_for_grpc_too(environment):
  for hosts in _bypass(**environment).values():
    assert hosts[:2] == ['a.org', 'b.org']
    assert 'node1' in hosts


def test_each_variable_keeps_its_own_hosts():
  hosts = _bypass(no_grpc_proxy='g.org', no_proxy='p.org')
  assert hosts['no_grpc_proxy'][0] == 'g.org'
  assert 'p.org' not in hosts['no_grpc_proxy']
  assert hosts['no_proxy'][0] == 'p.org'


def test_a_second_call_changes_nothing():
  environment = {}
  env = cluster_env.ClusterEnv('flags', 1, 2, 'node1:61440')
  proxies.bypass(env, environment)
  before = dict(environment)
  proxies.bypass(env, environment)
  assert environment == before


def test_one_process_alone_leaves_the_environment_as_it_is():
  environment = {'no_proxy': 'a.org'}
  proxies.bypass(cluster_env.ALONE, environment)
  assert environment == {'no_proxy': 'a.org'}
