"""Tests of plan: its errors against published rates."""

import csv
import dataclasses
import json
import os

import numpy as np
from PIL import Image
import pytest

from anp_jax.costs import device_step
from anp_jax.tools.plan import __main__ as command, check, fit, intervals, published_rates
from tests import launching, plan_settings

_ASKED = {'sheet': 'from data sheets', 'few': 'other rows of a fitted system'}
# What results have of each, and with how many digits after the point.
_FIGURES = {
  'mean': ('mean error', 1),
  'p95': ('95th percentile of the errors', 1),
  'covered': ('in their 90 % interval', 0),
}
_SHARED = os.path.join(os.path.dirname(__file__), '..', '..', '..', 'shared', 'data', 'scaling.csv')


@pytest.fixture(scope='module')
def rows():
  return published_rates.read()


@pytest.fixture(scope='module')
def comparisons(rows):
  return check.compare(rows)


def test_all_published_rows_are_there(rows):
  assert len(rows) == 31
  assert all(row.source for row in rows)
  if not os.path.exists(_SHARED):
    pytest.skip('no ../shared to compare the facts with')
  with open(_SHARED, newline='') as shared, open(published_rates.FILE) as file:
    # Two rates of this package follow those that others published.
    records = list(csv.DictReader(file))[:29]
    for fact, row in zip(csv.DictReader(shared), records, strict=True):
      del fact['network']  # a text; the row has the link's name
      assert fact == {name: row[name] for name in fact}


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


def test_the_software_of_a_row_is_read(rows):
  assert {r.software for r in rows} == set(published_rates.SOFTWARE)
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
    errors += [abs(r.seconds / fit.predict(fitted, r) - 1) for r in more]
  assert len(errors) == 8
  assert sum(errors) / len(errors) <= 0.08 and max(errors) <= 0.16
  mean, worst = (f'{100 * error:.1f}' for error in (sum(errors) / len(errors), max(errors)))
  assert f'as users plan, are missed by {mean} % (worst {worst})' in plan_settings.PAGE
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
  monkeypatch.setattr(check, 'compare', lambda rows: comparisons)
  assert command.main(['--check']) == 0
  *lines, last = capsys.readouterr().out.splitlines()
  assert sum('H100 SXM DGX' in line for line in lines) == 3
  values = json.loads(last)
  for sentence in check.summary(values):
    assert sentence in lines and sentence in plan_settings.PAGE
  mean = f'mean error {100 * values["sheet_mean"]:.1f} % from data sheets alone'
  covered = f'{100 * values["sheet_covered"]:.0f} % lie in their [90 % intervals]'
  expected = f'| the planner against {values["sheet_rates"]:g} published rates | {mean}; {covered}'
  assert expected in (launching.ROOT / 'README.md').read_text()
  with open(launching.ROOT / 'results/planner.csv', newline='') as f:
    recorded = {row['question']: row for row in csv.DictReader(f)}  # the last of each question
  for mode, question in _ASKED.items():
    for name, (words, digits) in _FIGURES.items():
      row = recorded[f'published rates, {question}: {words}']
      figure = f'{100 * values[f"{mode}_{name}"]:.{digits}f}'
      assert (int(row['n']), row['median']) == (values[f'{mode}_rates'], figure)
    row = recorded[f'published rates, {question}: mean error']
    assert row['note'].startswith(f'worst {100 * values[f"{mode}_worst"]:.1f}')


@pytest.mark.slow
def test_the_figure_of_the_page_is_what_its_command_draws(tmp_path):
  *typed, out = plan_settings.page_arguments('--out=docs/images/plan.png')
  assert command.main([*typed, f'--out={tmp_path}/plan.png']) == 0
  files = launching.ROOT / out.removeprefix('--out='), tmp_path / 'plan.png'
  page, drawn = (np.asarray(Image.open(file).convert('RGB'), int) for file in files)
  # A curve that is a pixel off changes more; last digits of a fit do less.
  assert page.shape == drawn.shape and np.abs(page - drawn).mean() < 0.1


def test_buckets_hold_all_gradients_in_the_order_of_the_backward_pass():
  workload = published_rates.resnet50('bfloat16')
  buckets = device_step.buckets(workload, 4, 25)
  # 25,557,032 gradients and 53,120 statistics, as the compiled step sums.
  assert sum(size for _, size in buckets) == 4 * (25557032 + 53120)
  shares = [share for share, _ in buckets]
  assert shares == sorted(shares) and shares[-1] == 1
  assert len(buckets) == 5  # as many as the program compiled for an H200 has
  assert all(size >= 25e6 for _, size in buckets[1:-1])
