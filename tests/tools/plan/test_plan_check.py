"""Tests of plan: its errors against published rates."""

import csv
import dataclasses
import json
import math
import os
import pathlib

import pytest

from anp_jax import config as config_lib
from anp_jax.costs import device_step
from anp_jax.tools.plan import (
  __main__ as command,
  check,
  fit,
  intervals,
  plan_tables,
  published_rates,
)
from tests import builders

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_ASKED = {'sheet': 'from data sheets', 'few': 'other rows of a fitted system'}
_SHARED = os.path.join(os.path.dirname(__file__), '..', '..', '..', 'shared', 'data', 'scaling.csv')


@pytest.fixture(scope='module')
def rows():
  return published_rates.read(plan_tables.load())


@pytest.fixture(scope='module')
def comparisons(rows):
  return check.compare(rows)


def _rows_file(folder, line):
  """Writes a table of one row; returns its path."""
  path = folder / 'rows.csv'
  path.write_text(f'{open(published_rates.FILE).readline()}{line}\n')
  return str(path)


def test_all_published_rows_are_there(rows):
  assert len(rows) == 31
  assert all(row.source for row in rows)
  if not os.path.exists(_SHARED):
    pytest.skip('no ../shared to compare the facts with')
  with open(_SHARED, newline='') as shared, open(published_rates.FILE) as file:
    # Two rates of this package follow those that others published.
    assert list(csv.DictReader(shared)) == list(csv.DictReader(file))[:29]


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
  path = _rows_file(tmp_path, f'H100,{network},16,8,64,float16,1,x')
  (row,) = published_rates.read(plan_tables.load(), path)
  assert row.cluster.link.bandwidth == gigabits * 1e9 / 8


def test_the_software_of_a_row_is_read(rows):
  kinds = {r.system: r.software for r in rows}
  assert kinds['P100 DGX-1'] == kinds['A100-40 TF1 XLA'] == 'framework'
  assert kinds['V100 DGX-1 MXNet'] == kinds['TPU v4'] == 'tuned'
  assert kinds['H100 anp_jax'] == kinds['H200 anp_jax'] == 'anp_jax'


@pytest.mark.slow
@pytest.mark.parametrize('mode, count, mean', [('sheet', 31, 0.12), ('few', 15, 0.08)])
def test_errors_are_within_their_goals(comparisons, mode, count, mean):
  errors = [abs(c.rate / c.row.rate - 1) for c in comparisons if c.logged.mode == mode]
  assert len(errors) == count
  assert sum(errors) / count <= mean and max(errors) <= 0.2


@pytest.mark.slow
def test_a_device_is_predicted_without_its_own_rows(rows):
  """Rates ten times as high change the predictions of all devices but one."""
  names = 'tpu-v4', 'tpu-v3', 'h200'
  rows = [r for r in rows if r.device.name in names]
  wrong = [
    dataclasses.replace(r, rate=10 * r.rate) if r.device.name == 'tpu-v4' else r for r in rows
  ]
  pairs = zip(check.compare(wrong), check.compare(rows), strict=True)
  for other, c in pairs:
    if c.logged.mode == 'sheet':
      same = other.rate == pytest.approx(c.rate, rel=1e-9)
      assert same == (c.row.device.name == 'tpu-v4')


@pytest.mark.slow
def test_rates_of_a_file_are_predicted_from_the_shipped_ones(rows, comparisons):
  (alone,) = [r for r in rows if r.system == 'H200 SXM']
  (single,) = check.compare([alone], [r for r in rows if r.device.name != 'h200'])
  (among_all,) = [c for c in comparisons if c.row == alone]
  assert single.rate == pytest.approx(among_all.rate, rel=1e-3)


@pytest.mark.slow
def test_rates_of_a_device_help_to_plan_more_nodes_of_it(rows):
  """Users fit all rows and plan more nodes: so are those with more nodes predicted here.

  One rate of two nodes that is an outlier must not spoil a plan of eight: fitted to it, the
  plan was 57 % below the published 76,327 images/s of 32 such devices with 102 images each.
  """
  errors = []
  for device in dict.fromkeys(r.device.name for r in rows):
    least = min(r.cluster.nodes for r in rows if r.device.name == device)
    more = [r for r in rows if r.device.name == device and r.cluster.nodes > least]
    fitted = fit.fit_rows([r for r in rows if r not in more]) if more else None
    errors += [abs(math.log(fit.predict(fitted, r) / r.seconds)) for r in more]
  assert len(errors) == 8
  assert sum(errors) / len(errors) <= 0.08 and max(errors) <= 0.16
  (last,) = [r for r in rows if r.device.name == 'a100-80-pcie' and r.cluster.nodes == 2]
  cluster = dataclasses.replace(last.cluster, nodes=8)
  seconds = fit.predict(fit.fit_rows(rows), dataclasses.replace(last, cluster=cluster, images=102))
  assert 32 * 102 / seconds == pytest.approx(76327, rel=0.12)


def test_two_exact_rows_give_the_line_that_they_lie_on(rows):
  """Rows made of T(b) = a + c b, on one device, are predicted in between."""
  first = next(r for r in rows if r.system.startswith('H200'))
  single = dataclasses.replace(first.cluster, devices=1, nodes=1)
  a, c = 6e-3, 0.13e-3

  def made(images):
    return dataclasses.replace(
      first, system='made', cluster=single, images=images, rate=images / (a + c * images)
    )

  ends = [made(32), made(512)]
  result = fit.fit_rows(ends)
  assert fit.predict(result, made(128), 'made') == pytest.approx(a + c * 128, rel=0.03)


@pytest.mark.slow
def test_the_errors_of_intervals_are_those_of_the_comparison(comparisons):
  """ANP_UPDATE_GOLDEN=1 writes the file of the errors with which a plan has intervals."""
  expected = [dataclasses.astuple(c.logged) for c in comparisons]
  if os.environ.get('ANP_UPDATE_GOLDEN'):
    with open(intervals.FILE, 'w', newline='') as f:
      writer = csv.writer(f, lineterminator='\n')
      writer.writerows([[x.name for x in dataclasses.fields(intervals.Error)], *expected])
    intervals.published.cache_clear()
  for error, (*names, log) in zip(intervals.published(), expected, strict=True):
    assert dataclasses.astuple(error)[:-1] == tuple(names)
    assert error.log == pytest.approx(log, abs=2e-3)  # the last digits of a fit


@pytest.mark.slow
def test_pages_print_what_check_prints(capsys, comparisons, monkeypatch):
  monkeypatch.setattr(check, 'compare', lambda rows, further: comparisons)
  assert command.main(['--check']) == 0
  *lines, last = capsys.readouterr().out.splitlines()
  assert sum('H100 SXM DGX' in line for line in lines) == 3
  values = json.loads(last)
  page = ' '.join((_ROOT / 'docs/planner.md').read_text().split())
  for sentence in check.summary(values):
    assert sentence in lines and sentence in page
  mean = f'mean error {100 * values["sheet_mean"]:.1f} % from data sheets alone'
  expected = f'| the planner against {values["sheet_rates"]:g} published rates | {mean}'
  assert expected in (_ROOT / 'README.md').read_text()
  with open(_ROOT / 'results/planner.csv', newline='') as f:
    recorded = {row['question']: row for row in csv.DictReader(f)}  # the last of each question
  for mode, question in _ASKED.items():
    row = recorded[f'published rates, {question}: mean error']
    mean, worst, covered = (100 * values[f'{mode}_{name}'] for name in ('mean', 'worst', 'covered'))
    assert (int(row['n']), row['median']) == (values[f'{mode}_rates'], f'{mean:.1f}')
    assert row['note'].startswith(f'worst {worst:.1f}; {covered:.0f} % in their 90 % interval')


def test_buckets_hold_all_gradients_in_the_order_of_the_backward_pass():
  workload = published_rates.resnet50('bfloat16')
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
    ('H100,NVLink,10,4,64,float16,1,x', 'devices=10, expected as many on each of 3 nodes'),
    ('H100,NVLink,8,8,64,float61,1,x', "dtype='float61': expected one of"),
    ('H100,PCIe 6,8,8,64,float16,1,x', "network='PCIe 6': link='pcie6', a NAME or"),
    ('ZX81,NVLink,8,8,64,float16,1,x', "system 'ZX81': no device of the"),
    ('H100,NVLink,64,8,64,float16,1,x', "'NVLink', a link of links.toml"),
    # They were ten gigabits of Ethernet.
    *(
      (f'H100,{network},{devices},8,64,float16,1,x', words)
      for devices in (8, 64)
      for network, words in (
        ('NVLink; Omni-Path', "'Omni-Path', a link of links.toml"),
        ('NVLink; 4x XDR900 a node', "'4x XDR900 a node', a link of links.toml such as 8x NDR400"),
        ('NVLink; 4x XDR900', "did you mean 'ib-xdr800'?"),
        ('NVLink; 1x HDR100', "did you mean 'ib-hdr200'?"),
      )
    ),
  ),
)
def test_bad_rows_are_one_line(tmp_path, capsys, line, words):
  assert command.main(['--check', f'--rows={_rows_file(tmp_path, line)}']) == 2
  assert words in builders.error_line(capsys)


def test_files_without_rows_are_refused(tmp_path):
  path = tmp_path / 'rows.png'
  path.write_bytes(b'\x89PNG\r\n\x1a\n')
  for name, words in ((str(path), 'expected a CSV file'), ('none.csv', '--rows=')):
    with pytest.raises(config_lib.ConfigError, match=words):
      published_rates.read(plan_tables.load(), name)
