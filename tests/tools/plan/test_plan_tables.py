"""Tests of plan: its tables of devices and links."""

import pytest

from anp_jax.system import device_peaks
from anp_jax.tools.plan import plan_tables
from tests import builders

_DEVICE = """
[devices.mine]
kind = "tensor"
year = 2025
tflops = { float32 = 100, bfloat16 = 200 }
gigabytes = 48
gigabytes_per_second = 1000
node_link = "wire"
host_cores = 8
source = "its maker"
[links.wire]
gigabytes_per_second = 2.5
microseconds = 20
source = "its maker"
"""


def test_peaks_agree_with_those_of_mfu():
  devices = plan_tables.load().devices
  kinds = {
    'a100-80': 'NVIDIA A100-SXM4-80GB',
    'h100': 'NVIDIA H100 80GB HBM3',
    'h200': 'NVIDIA H200',
    'a30': 'NVIDIA A30',
    'l4': 'NVIDIA L4',
    'a10g': 'NVIDIA A10G',
    'b200': 'NVIDIA B200',
    'tpu-v4': 'TPU v4',
    'tpu-v5e': 'TPU v5 lite',
    'tpu-v5p': 'TPU v5p',
    'tpu-v6e': 'TPU v6 lite',
  }
  for name, kind in kinds.items():
    for dtype in ('bfloat16', 'float32'):
      assert devices[name].peak(dtype) == device_peaks.peak_flops(kind, dtype)
  # JAX counts two devices on a chip.
  chip = devices['tpu-v3'].peak('bfloat16')
  assert chip == 2 * device_peaks.peak_flops('TPU v3', 'bfloat16')


def test_every_entry_has_a_source_and_a_link():
  entries = plan_tables.load()
  for device in entries.devices.values():
    assert device.source and device.node_link in entries.links


def test_units_without_a_dtype_leave_it_to_the_slow_ones():
  entries = plan_tables.load()
  assert entries.device('v100').effective_kind('float16') == 'tensor'
  assert entries.device('v100').effective_kind('float32') == 'vector'
  assert entries.device('v100').effective_kind('bfloat16') == 'vector'
  assert entries.device('a100-80').effective_kind('float32') == 'tensor'


def test_ports_add_up():
  entries = plan_tables.load()
  link = entries.link('--link', 'ib-ndr400x8')
  assert link.bandwidth == 8 * 400e9 / 8 and link.latency == 14e-6
  assert entries.link('--link', 'eth-1').bandwidth == 1e9 / 8


def test_entries_of_a_user_come_first(tmp_path):
  path = tmp_path / 'mine.toml'
  path.write_text(_DEVICE)
  entries = plan_tables.load(str(path))
  assert entries.device('mine').peak('bfloat16') == 200e12
  assert entries.link('--link', 'wirex2').bandwidth == 5e9
  assert 'h100' in entries.devices


@pytest.mark.parametrize(
  'old, new, words',
  (
    ('kind =', 'knid =', "knid='tensor': unknown key; did you mean 'kind'?"),
    ('"tensor"', '"tensr"', "kind='tensr': expected one of"),
    ('gigabytes = 48', 'gigabytes = -1', 'gigabytes=-1: expected a number'),
    ('gigabytes = 48', '', 'lacks gigabytes'),
    ('bfloat16 = 200', 'bfloat16 = 0', 'expected a table of dtype'),
    ('= "wire"', '= "wier"', "did you mean 'wire'?"),
    ('[devices.', '[device.', "table 'device': expected one of devices, links"),
    ('microseconds = 20', '', 'lacks microseconds'),
    ('[links.wire]', '[links.wire', "--entries='"),
    ('{ float32 = 100, bfloat16 = 200 }', '{}', 'expected a table of dtype'),
    ('year =', 'aliases = "A("\nyear =', 'expected a regular expression'),
    ('year =', f'aliases = "A{{{10**11}}}"\nyear =', 'expected a regular expression'),
    ('year =', f'aliases = "{"(" * 9999}"\nyear =', 'expected a regular expression'),
    ('[devices.mine]', '[devices]\nmine = 3\n[devices.x]', 'expected tables such as [devices.m'),
    (_DEVICE, 'devices = 3', 'devices=3: expected tables such as [devices.m'),
  ),
)
def test_bad_entries_name_the_key(tmp_path, old, new, words):
  path = tmp_path / 'mine.toml'
  path.write_text(_DEVICE.replace(old, new))
  assert words in builders.refusal(plan_tables.load, str(path))
