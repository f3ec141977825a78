"""Memory that is left: the host's, and that of the cgroups above a process."""

import math

import pytest

from anp_jax.system import host_memory
from tests import builders

_HOST = {'proc/meminfo': 'MemTotal: 9000 kB\nMemAvailable:    8000 kB\n'}
_V2 = {
  'proc/self/cgroup': '0::/job/task\n',
  'sys/fs/cgroup/job/task/memory.max': 'max\n',
  'sys/fs/cgroup/job/task/memory.current': '100\n',
  'sys/fs/cgroup/job/task/memory.stat': 'inactive_file 0\n',
  'sys/fs/cgroup/job/memory.max': '5000\n',
  'sys/fs/cgroup/job/memory.current': '3000\n',
  'sys/fs/cgroup/job/memory.stat': 'anon 1\ninactive_file 400\n',
}
_V1 = {
  'proc/self/cgroup': '3:cpu,cpuacct:/a\n2:memory:/job\n0::/\n',
  'sys/fs/cgroup/memory/job/memory.limit_in_bytes': '7000\n',
  'sys/fs/cgroup/memory/job/memory.usage_in_bytes': '1000\n',
  'sys/fs/cgroup/memory/job/memory.stat': 'inactive_file 5\ntotal_inactive_file 50\n',
}


@pytest.mark.parametrize(
  'files, bytes_left',
  [
    ({}, math.inf),
    (_HOST, 8000 * 1024),
    (_HOST | _V2, 2400),
    (_HOST | _V1, 6005),
    (_HOST | {'proc/self/cgroup': '0::/gone\n'}, 8000 * 1024),
  ],
)
def test_what_is_left_is_the_least_of_all_limits(tmp_path, files, bytes_left):
  builders.write_tree(tmp_path, files)
  assert host_memory.available(str(tmp_path)) == bytes_left


def test_this_host_has_some():
  assert 2**20 < host_memory.available() < 2**50
