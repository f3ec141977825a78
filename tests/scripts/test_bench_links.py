"""The benchmark of links: what it counts."""

import pytest

from scripts.bench import links

_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 9999999   50000    0    0    0     0          0         0 9999999   50000    0    0    0     0       0          0
  eth0:    1234      56    0    0    0     0          0         0    7000      78    0    0    0     0       0          0
   ib0:77       1    0    0    0     0          0         0 500       2    0    0    0     0       0          0
"""  # noqa: E501


def test_what_interfaces_sent_is_all_but_loopback():
  assert links.sent(_DEV) == 7500


def test_a_rate_that_is_none_is_refused(monkeypatch, capsys):
  monkeypatch.setattr('sys.argv', ['links', '--rate=0gbit'])
  with pytest.raises(SystemExit):
    links._flags()
  assert "invalid bytes_per_second value: '0gbit'" in capsys.readouterr().err
