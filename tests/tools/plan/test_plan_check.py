"""Tests of plan: its errors against published rates."""

import csv
import json
import os

import pytest

from anp_jax import config as config_lib
from anp_jax.costs import device_step
from anp_jax.tools.plan import __main__ as command, check, fit, plan_tables, published_rates

_SHARED = os.path.join(os.path.dirname(__file__), '..', '..', '..', 'shared', 'data', 'scaling.csv')


@pytest.fixture(scope='module')
def rows():
  return published_rates.read(plan_tables.load())


@pytest.fixture(scope='module')
def comparisons(rows):
  return check.compare(rows)


def test_all_published_rows_are_there(rows):
  assert len(rows) == 29
  assert all(row.source for row in rows)
  if not os.path.exists(_SHARED):
    pytest.skip('no ../shared to compare the facts with')
  with open(_SHARED, newline='') as shared, open(published_rates.FILE) as file:
    assert list(csv.DictReader(shared)) == list(csv.DictReader(file))


def test_systems_have_their_devices_and_links(rows):
  parts = {
    r.system: (r.device.name, r.cluster.node_link.name, r.cluster.link.name)
    for r in rows
    if r.cluster.nodes > 1
  }
  assert parts == {
    'V100 DGX-2H': ('v100-sxm3', 'nvlink2', 'ib-edr100x8'),
    'A100-80 DGX': ('a100-80', 'nvlink3', 'ib-hdr200x8'),
    'A100-40 Dell XE8545': ('a100-40', 'nvlink3', 'ib-hdr200x2'),
    'A100-80 PCIe Dell R750xa': ('a100-80-pcie', 'pcie4', 'ib-edr100x1'),
    'H100 SXM DGX': ('h100', 'nvlink4', 'ib-ndr400x8'),
    'TPU v3': ('tpu-v3', 'ici-v3', 'eth-10'),
    'TPU v4': ('tpu-v4', 'ici-v4', 'eth-10'),
  }


@pytest.mark.parametrize(
  'network, gigabits',
  (
    ('10-20 Gbit/s Ethernet; parameter servers', 15),
    ('PCIe 3; 25 GbE', 25),
    ('NVLink; 2x 100 Gbit/s Ethernet', 200),
    ('NVSwitch; 8x NDR400 InfiniBand a node', 3200),
    ('PCIe 4; 1x EDR100 InfiniBand a node', 100),
  ),
)
def test_networks_are_read(tmp_path, network, gigabits):
  path = tmp_path / 'rows.csv'
  head = open(published_rates.FILE).readline()
  path.write_text(f'{head}H100,{network},16,8,64,float16,1,x\n')
  (row,) = published_rates.read(plan_tables.load(), str(path))
  assert row.cluster.link.bandwidth == gigabits * 1e9 / 8


@pytest.mark.slow
def test_other_systems_predict_a_system_within_a_fifth(comparisons):
  errors = [abs(c.sheet / c.row.rate - 1) for c in comparisons]
  assert len(errors) == 29
  assert sum(errors) / len(errors) <= 0.20


@pytest.mark.slow
def test_at_most_two_rows_predict_the_rest_of_a_system(comparisons):
  errors, fitted = [], {}
  for c in comparisons:
    if c.is_fitted:
      fitted.setdefault(c.row.system, []).append(c)
    elif c.few is not None:
      errors.append(abs(c.few / c.row.rate - 1))
  # One system has a single row; all others are tried.
  assert len(fitted) == 11 and max(map(len, fitted.values())) == 2
  assert len(errors) == 14
  assert sum(errors) / len(errors) <= 0.08
  assert max(errors) <= 0.15


@pytest.mark.slow
def test_a_system_is_predicted_without_its_own_rows(rows):
  """Rates ten times as high change the prediction of all systems but one."""
  systems = list(dict.fromkeys(r.system for r in rows if r.system != 'TPU v4'))[:2]
  rows = [r for r in rows if r.system in ('TPU v4', *systems)]
  wrong = [
    published_rates.dataclasses.replace(r, rate=10 * r.rate) if r.system == 'TPU v4' else r
    for r in rows
  ]
  rates = {id(c.row): c.sheet for c in check.compare(wrong)}
  for row, c in zip(wrong, check.compare(rows), strict=True):
    same = rates[id(row)] == pytest.approx(c.sheet, rel=1e-9)
    assert same == (row.system == 'TPU v4')


def test_two_exact_rows_give_the_line_that_they_lie_on(rows):
  """Rows made of T(b) = a + c b, on one device, are predicted in between."""
  first = next(r for r in rows if r.system.startswith('H200'))
  single = published_rates.dataclasses.replace(first.cluster, devices=1, nodes=1)
  a, c = 6e-3, 0.13e-3

  def made(images):
    return published_rates.dataclasses.replace(
      first, system='made', cluster=single, images=images, rate=images / (a + c * images)
    )

  ends = [made(32), made(512)]
  result = fit.fit_cases(fit.cases([*rows, *ends], check.resnet50))
  (middle,) = fit.cases([made(128)], check.resnet50)
  assert fit.predict(result, middle) == pytest.approx(a + c * 128, rel=0.03)


@pytest.mark.slow
def test_check_prints_rows_and_means(capsys, comparisons, monkeypatch):
  monkeypatch.setattr(check, 'compare', lambda rows: comparisons)
  assert command.main(['--check']) == 0
  *lines, last = capsys.readouterr().out.splitlines()
  assert sum('H100 SXM DGX' in line for line in lines) == 2
  summary = json.loads(last)
  # A plan prints these means without fitting all rows again.
  means = summary['sheet_mean'], summary['few_mean']
  assert means == pytest.approx((check.SHEET_ERROR, check.FEW_ERROR), abs=5e-4)


def test_buckets_hold_all_gradients_in_the_order_of_the_backward_pass():
  workload = check.resnet50('bfloat16')
  buckets = device_step.buckets(workload, 4, 25)
  # 25,557,032 gradients and 53,120 statistics, as the compiled step sums.
  assert sum(size for _, size in buckets) == 4 * (25557032 + 53120)
  shares = [share for share, _ in buckets]
  assert shares == sorted(shares) and shares[-1] == 1
  assert len(buckets) == 5  # as many as the program compiled for an H200 has
  assert all(size >= 25e6 for _, size in buckets[1:-1])


@pytest.mark.parametrize(
  'line, words',
  (
    ('H100,NVLink,0,8,64,float16,1,x', "devices='0', expected a number above"),
    ('H100,NVLink,8,8,64,float61,1,x', "dtype='float61': expected one of"),
    ('H100,PCIe 6,8,8,64,float16,1,x', "network='PCIe 6': link 'pcie6': expected"),
    ('ZX81,NVLink,8,8,64,float16,1,x', "system 'ZX81': no device of the"),
  ),
)
def test_bad_rows_are_one_line(tmp_path, capsys, line, words):
  path = tmp_path / 'rows.csv'
  head = open(published_rates.FILE).readline()
  path.write_text(f'{head}{line}\n')
  assert command.main(['--check', f'--rows={path}']) == 2
  message = capsys.readouterr().err
  assert words in message and message.count('\n') == 1


def test_files_without_rows_are_refused(tmp_path):
  path = tmp_path / 'rows.png'
  path.write_bytes(b'\x89PNG\r\n\x1a\n')
  for name, words in ((str(path), 'expected a CSV file'), ('none.csv', '--rows=')):
    with pytest.raises(config_lib.ConfigError, match=words):
      published_rates.read(plan_tables.load(), name)
