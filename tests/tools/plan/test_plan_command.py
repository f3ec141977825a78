"""Tests of plan: the command, its sizes, its figure and its errors."""

import dataclasses
import json
import re

import pytest

from anp_jax.config import command_line
from anp_jax.costs import collectives
from anp_jax.system import xla_flags
from anp_jax.tools import flag_values
from anp_jax.tools.plan import (
  __main__ as command,
  device_calibration,
  gradient_handling,
  machines,
  plan_page,
  plan_tables,
  points as points_lib,
  published_rates,
  workload,
)
from tests import builders, plan_settings

_LENET = 'configs/lenet.py'
_DEVICE = ['--device=a100-80', '--link=ib-hdr200x8']
_DATA = ['--examples=1442', '--classes=10']


def _plan(capsys, *arguments):
  """Runs the command; gives its lines and the JSON of the last one."""
  assert command.main(list(arguments)) == 0
  *lines, last = capsys.readouterr().out.splitlines()
  return lines, json.loads(last)


_LISTS = {
  '1,2,4,...,512': [2**i for i in range(10)],
  '1,2,...,5': [1, 2, 3, 4, 5],
  '2,4,6,…,12': [2, 4, 6, 8, 10, 12],
  '1,3,9,...,81': [1, 3, 9, 27, 81],
  '8, 1,2,2': [1, 2, 8],
}
_BAD_LISTS = '0||1,x|1,...,8|...,8|1,2,4,...,500|1,2,5,...,9|4,2,...,1|1,2,...|1,2,...,4,8|-1|1.5'


@pytest.mark.parametrize('text', [*_LISTS, *_BAD_LISTS.split('|')])
def test_three_points_stand_for_a_progression(text):
  if text in _LISTS:
    assert list(flag_values.numbers('--nodes', text)) == _LISTS[text]
    return
  builders.assert_refused('--nodes=', flag_values.numbers, '--nodes', text)


@pytest.mark.slow
def test_plan_has_a_table_a_figure_and_json(tmp_path, capsys):
  typed = plan_settings.page_arguments('--device=h200')
  lines, result = _plan(capsys, *typed, f'--out={tmp_path}/plan.png')
  points = result['points']
  assert [p['devices'] for p in points] == [8 * 2**i for i in range(10)]
  assert sum(line.startswith('sync ') for line in lines) == 10
  for p in points:
    seconds = sum(p['step_seconds'].values())
    assert set(p['step_seconds']) == {'compute', 'communication', 'input', 'fixed'}
    rate = p['images_per_second']
    assert rate == pytest.approx(p['batch'] / seconds, rel=1e-3)
    # 9,600 images an epoch, 90 epochs.
    assert p['epoch_seconds'] == pytest.approx(9600 / rate, rel=1e-5)
    hours = p['devices'] * 90 * 9600 / rate / 3600
    assert p['device_hours'] == pytest.approx(hours, rel=0.15)
    assert p['fits'] and 0 < p['efficiency'] <= 1
  # The batch of 1,024 divides into groups of 32 on up to 32 devices.
  batches = [p['batch'] for p in points]
  assert batches[:4] == [1024, 1024, 1024, 2048] and batches[-1] == 32 * 4096
  # A batch of 16,384 is more than an epoch.
  assert 'an epoch, which a line cautions of: here 32 nodes)' in plan_settings.PAGE
  assert any(
    line.startswith('sync: pays up to 32 nodes (256 devices); then data') for line in lines
  )
  png = (tmp_path / 'plan.png').read_bytes()
  assert png.startswith(b'\x89PNG') and len(png) < 200e3


@pytest.mark.parametrize(
  'arguments, words',
  (
    (['--device=h20'], "did you mean 'h200'?"),
    (['--link=ib-ndr40x8'], "did you mean 'ib-ndr400'?"),
    (['--link=ib-ndr400x0'], 'expected 1 to 64 ports'),
    (['--link=omni-pathx2'], "'omni-pathx2', a NAME or NAMExPORTS of links.toml: expected one of"),
    (['--link=omni-path'], "did you mean 'omni-path-100'?"),
    (['--link=slingshotx4'], "did you mean 'slingshot-200'?"),
    (['--link=4x XDR800'], "did you mean 'ib-xdr800'?"),
    (['--software=tune'], "--software='tune': expected one of anp_jax, tuned, framework"),
    (['--nodes=0'], "--nodes='0': expected whole numbers from 1"),
    (['--nodes=1,2,4,...,500'], 'three points and a last number'),
    (['--nodes=513', '--devices_per_node=8'], '4,104 devices, expected 4,096'),
    (['--devices_per_node=0'], '--devices_per_node=0: expected a whole number'),
    (['--strategies=synk'], '--strategies=synk: expected one of'),
    (['--strategies=parameter_server:asinc'], "did you mean 'parameter_server:async'?"),
    (['--scaling=week'], "--scaling='week': expected one of auto, strong, weak"),
    (['--input_rate=much'], "--input_rate='much': expected measured, or images/s"),
    (['--input_rate='], "--input_rate='': expected measured, or images/s"),
    (['--input_rate=0'], "--input_rate='0': expected measured, or images/s of a node, above 0"),
    (['--input_rate=measured', '--config.data.source=synthetic'], 'has no images to decode'),
    (['--jitter=-1'], '--jitter=-1.0: expected a number from 0'),
    (['--device='], '--device is missing: one of k80'),
    (['--link='], '--link=NAMExPORTS is missing'),
    (['--config=configs/lenett.py'], "no file 'configs/lenett.py'"),
    (['--config.duraton=3'], "unknown key config.duraton; did you mean 'dur"),
    (['--measure'], '--device=a100-80: expected without --measure: more of the device at hand'),
    (['--measure', '--device=', '--data_sheet'], '--data_sheet: expected without --measure: '),
    (['--measure', '--device=', '--software=tuned'], '--software=tuned: expected without --meas'),
    (['--measure_batches=32,128'], '--measure_batches=32,128: expected with --measure: '),
    (['--examples=0'], '--examples=0: expected a number above 0'),
    (['--classes=0'], '--classes=0: expected a number above 0'),
    (['--images_per_device=0'], '--images_per_device=0: expected a number above 0'),
    (['--target_hours=0'], '--target_hours=0.0: expected a number above 0'),
    (['--budget_devices=0'], '--budget_devices=0: expected a number above 0'),
    (['--mtbf=0'], '--mtbf=0.0: expected a number above 0'),
    (['--repair=1'], '--repair=1.0: expected with --mtbf: it says what follows a failure'),
    (['--restart_seconds=180'], '--restart_seconds=180.0: expected with --mtbf: '),
    (['--elastic_seconds=10'], '--elastic_seconds=10.0: expected with --mtbf: '),
    (['--repair=0'], '--repair=0.0: expected with --mtbf: it says what follows a failure'),
    (['--restart_seconds=9'], '--restart_seconds=9.0: expected with --mtbf: '),
    (['--elastic_seconds=9'], '--elastic_seconds=9.0: expected with --mtbf: '),
    (['--check'], '--config=configs/lenet.py: expected without --check: nothing is planned'),
    (['--node=2'], "unknown argument '--node=2'; did you mean '--nodes'?"),
    (['--scaling=strong', '--nodes=3'], 'config.batch_size=64 does not divide by 6'),
    (['--scaling=strong', '--images_per_device=64'], 'and no --images_per_device'),
    (['--scaling=strong', '--config.batch_size=0'], '--scaling=strong: expected a config.batch_si'),
    (['--images_per_device=100000000'], 'at most'),
    (['--target_hours=2'], '--budget_devices is missing'),
    (['--budget_devices=1', '--target_hours=1'], 'fewer than a node has'),
    (
      ['--target_hours=2', '--budget_devices=2', '--nodes=4'],
      '--nodes=4: 8 devices, over --budget_devices=2',
    ),
    (
      ['--target_hours=2', '--budget_devices=8192', '--nodes='],
      '--budget_devices=8192: expected 4,096 at most',
    ),
    (
      ['--device=tpu-v4', '--link=', '--strategies=sync,parameter_server:async'],
      "over which 'parameter_server:async' sends",
    ),
    (['--entries=none.toml'], "--entries='none.toml'"),
    (['--entries=tests/README.md'], "--entries='tests/README.md'"),
    (['--out=none/plan.png'], "--out='none/plan.png': none is no folder"),
  ),
)
def test_bad_input_is_one_line(capsys, priors_only, arguments, words):
  grid = ['--nodes=1,2', '--devices_per_node=2']
  assert command.main([f'--config={_LENET}', *_DEVICE, *_DATA, *grid, *arguments]) == 2
  assert words in builders.error_line(capsys)


@pytest.mark.parametrize(
  'arguments, words',
  (
    (['--check', '--entries=x.toml'], '--entries=x.toml: expected without --check: nothing is '),
    (['--check', '--list'], '--list: expected without --check: '),
    (['--list', '--nodes=2'], '--nodes=2: expected without --list: nothing is planned'),
    (['--list', '--config.seed=2'], '--config.seed: not for --check or --list'),
  ),
)
def test_what_plans_nothing_takes_no_flags_of_plans(capsys, arguments, words):
  assert command.main(arguments) == 2
  assert words in builders.error_line(capsys)


def test_input_is_timed_on_the_files_at_hand(tmp_path, capsys, priors_only):
  image = builders.encode_image(builders.random_pixels(200, 200), 'JPEG')
  builders.write_tree(tmp_path, {f'{i % 2}/{i}.jpg': image for i in range(8)})
  data = {'source': 'folder', 'path': tmp_path, 'train_split': '.', 'decode': 'bilinear'}
  keys = [f'--config.data.{key}={value}' for key, value in data.items()]
  grid = ['--nodes=1', '--devices_per_node=2', '--input_rate=measured']
  lines, _ = _plan(capsys, f'--config={_LENET}', *_DEVICE, *grid, *keys)
  (line,) = [line for line in lines if line.startswith('input: ')]
  assert re.search(r'ms of a core an image \(read .*, decode .*\), of ', line)
  lines, _ = _plan(capsys, f'--config={_LENET}', *_DEVICE, *grid[:2], '--input_rate=70', *keys)
  assert 'input: 70 images/s a node; 32 cores a node' in lines


def test_a_plan_says_where_input_binds_and_what_would_do(capsys, priors_only):
  """Hosts of 200 images/s, before devices that would take `free` of each."""
  flags = [f'--config={_LENET}', *_DATA, *_DEVICE, '--nodes=1,2', '--devices_per_node=2']
  lines, result = _plan(capsys, *flags, '--input_rate=200')
  first, second = result['points']
  assert second['images_per_second'] == pytest.approx(400)
  (line,) = [line for line in lines if ': input binds' in line]
  step = first['step_seconds']
  free = first['batch'] / (sum(step.values()) - step['input'])
  assert line.startswith('sync: input binds with nodes=1,2: its host would have to decode ')
  rate, times = re.search(r'decode ([\d,]+) images/s, (.+) times as many', line).groups()
  assert float(rate.replace(',', '')) == pytest.approx(free, rel=1e-4)
  assert float(times) == pytest.approx(free / 200, rel=1e-2)
  lines, _ = _plan(capsys, *flags, f'--input_rate={1.01 * free:.0f}')
  assert not any('input binds' in line for line in lines)


def test_target_ranks_by_device_hours(capsys, priors_only):
  flags = [
    f'--config={_LENET}',
    '--device=v100,h100',
    '--budget_devices=32',
    '--devices_per_node=4',
    '--strategies=sync,local_sgd',
    '--examples=1000000',
    '--classes=10',
    '--config.batch_size=4096',
  ]
  lines, result = _plan(capsys, *flags, '--target_hours=2')
  ranking = result['ranking']
  hours = [p['device_hours'] for p in ranking]
  assert hours == sorted(hours)
  assert all(p['run_seconds'] <= 2 * 3600 for p in ranking)
  assert {p['nodes'] for p in result['points']} == {1, 2, 4, 8}
  assert any('cheapest within 2 h and 32 devices' in line for line in lines)
  cores = [f'{4 * plan_tables.load().device(name).host_cores:g}' for name in ('v100', 'h100')]
  assert cores[0] != cores[1] and any(f'; {", ".join(cores)} cores' in line for line in lines)
  assert command.main([*flags, '--target_hours=0.0001']) == 1
  assert 'no way reaches 0.0001 h' in capsys.readouterr().out
  _, result = _plan(capsys, *flags, '--target_hours=2', '--nodes=1,3', '--scaling=weak')
  assert {p['nodes'] for p in result['points']} == {1, 3}


_ONE = 'pays up to 1 node (2 devices); then data: an epoch has fewer images than a batch binds'
_NONE = 'pays on none of these sizes; data: an epoch has fewer images than a batch binds'


@pytest.mark.parametrize('examples, note', [(128, ''), (127, _ONE), (64, _ONE), (63, _NONE)])
def test_a_batch_beyond_an_epoch_is_named_and_does_not_pay(capsys, priors_only, examples, note):
  """Two devices compute 64 images, and four 128."""
  flags = ['--nodes=1,2', '--devices_per_node=2', '--images_per_device=32', '--classes=10']
  flags += [f'--config={_LENET}', *_DEVICE, f'--examples={examples}', '--strategies=sync']
  caution = f'caution  a batch of 128 images is drawn from {examples}: '
  lines, _ = _plan(capsys, *flags)
  assert any(line.startswith(caution) for line in lines) == bool(note)
  assert (f'sync: {note}' in lines) == bool(note)
  lines, _ = _plan(capsys, *flags, '--target_hours=9', '--budget_devices=4')
  assert any(line.startswith(caution) for line in lines) == bool(note)


def test_a_link_that_a_torus_does_not_use_is_named(capsys, priors_only):
  flags = [f'--config={_LENET}', *_DATA, '--device=tpu-v4', '--nodes=2', '--strategies=sync']
  flags.append('--devices_per_node=2')
  words = '--link=eth-100 is not used'
  lines, _ = _plan(capsys, *flags, '--link=eth-100')
  assert any(words in line for line in lines)
  assert not any('not used' in line for line in _plan(capsys, *flags)[0])


def test_each_of_many_curves_has_its_own_style(tmp_path, monkeypatch):
  axes = []
  monkeypatch.setattr(plan_page, '_ticks', lambda axis, sizes: axes.append(axis))
  points = [
    points_lib.Point('sync', collectives.Cluster(n, 1, None, None), rate=n, efficiency=1.0)
    for n in (1, 2)
  ]
  plans = {f'way{i}': points for i in range(9)}
  plan_page.draw(str(tmp_path / 'plan.png'), 'many', plans)
  curves = [x for x in axes[0].lines if x.get_label().startswith('way')]
  styles = {(x.get_color(), x.get_linestyle()) for x in curves}
  assert len(curves) == len(styles) == 9


def test_each_device_has_its_ideal(tmp_path, monkeypatch):
  axes = []
  monkeypatch.setattr(plan_page, '_ticks', lambda axis, sizes: axes.append(axis))
  cluster = collectives.Cluster(4, 2, None, None)
  points = [points_lib.Point('sync', cluster, rate=r, efficiency=0.5) for r in (8.0, 80.0)]
  plans = {'a sync': points[:1], 'a fsdp': points[:1], 'b sync': points[1:]}
  plan_page.draw(str(tmp_path / 'plan.png'), 'two', plans)
  # Half of what 8 devices reach that never wait.
  ideals = {x.get_label(): x.get_ydata()[-1] for x in axes[0].lines if 'ideal' in x.get_label()}
  assert ideals == {'a ideal': 16.0, 'b ideal': 160.0}


def test_published_rates_are_those_of_like_software_and_dtype():
  known_tables = plan_tables.load()
  rows = published_rates.read()
  step = published_rates.resnet50('bfloat16')

  def names(devices, dtype, software='tuned'):
    chosen = [
      machines.Machine(
        known_tables.device(device), (), None, 0.0, [r for r in rows if r.device.name == device], ''
      )
      for device in devices
    ]
    cost = dataclasses.replace(step, dtype=dtype)
    return {name for name, *_ in machines.published_rates(chosen, cost, software)}

  # Published in float16, and measured in bfloat16.
  assert names(['h100'], 'bfloat16') == {'H100 SXM DGX'}
  assert names(['h100'], 'bfloat16', 'anp_jax') == {'H100 anp_jax'}
  assert names(['h100'], 'float32') == set()
  # Volta has no bfloat16 units; its rates are those of float16.
  assert names(['v100'], 'bfloat16') == set()
  assert names(['v100'], 'float16') == {'V100 DGX-1 MXNet'}
  assert names(['v100', 'h100'], 'float16') == {'V100 DGX-1 MXNet', 'H100 SXM DGX'}


def test_a_plan_from_data_sheets_needs_no_rate_of_the_device(monkeypatch):
  known_tables = plan_tables.load()
  # Those of two devices: to fit all takes seconds.
  rows = [r for r in published_rates.read() if r.device.name in ('h100', 'v100')]
  config = command_line.load('configs/resnet_anp.py:modern', {'data.source': 'synthetic'})
  flags = command._flags(['--device=h100', '--data_sheet', '--nodes=8', '--link=ib-ndr400x8'])
  flags.devices_per_node = 8

  def efficiency(factor):
    changed = [
      dataclasses.replace(r, rate=factor * r.rate) if r.device.name == 'h100' else r for r in rows
    ]
    monkeypatch.setattr(published_rates, 'read', lambda *_: changed)
    cost = published_rates.resnet50('bfloat16')
    (machine,) = machines.from_flags(known_tables, flags, config, cost)
    return machine.efficiency

  assert efficiency(10) == efficiency(1)


def test_measured_steps_give_a_line():
  assert device_calibration.line([(32, 10.4), (128, 20.0)]) == pytest.approx((7.2, 0.1))
  # Noise: a cannot be negative, nor can c.
  assert device_calibration.line([(32, 2.0), (128, 12.8)]) == (0, 0.1)
  assert device_calibration.line([(32, 12.8), (128, 12.8)]) == (0, 0.1)


def test_measured_device_predicts_more_of_it(capsys, monkeypatch, priors_only):
  """Times are made up here; the plan has to repeat them."""
  seconds = {32: [0.0104], 128: [0.0200]}
  monkeypatch.setattr(device_calibration, '_seconds', lambda c, w, d, images: seconds[images] * 3)
  settings, handled = [], []
  monkeypatch.setattr(xla_flags, 'enable_for', settings.append)

  def handling(config):
    handled.append((config.strategy.name, config.batch_size))
    return 0.001, 0.002

  monkeypatch.setattr(gradient_handling, 'seconds', handling)
  flags = [f'--config={_LENET}', *_DATA, '--measure', '--measure_batches=32,128']
  flags += ['--devices_per_node=1', '--strategies=sync,parameter_server', '--images_per_device=64']
  lines, result = _plan(capsys, *flags)
  # More of them: up to 64 nodes like this one, over Ethernet.
  assert [p['nodes'] for p in result['points']] == 2 * [2**i for i in range(7)]
  assert result['link'] == 'eth-10'
  assert lines[0].startswith('measured on cpu: 10.4 ms for 32 images')
  expected = "a gradient of 'parameter_server' takes its worker 1 ms more than the pass,"
  assert lines[1] == f'{expected} and the servers 2 ms'
  assert "those of the entry 'cpu'" in lines[2]
  # T(64) = 7.2 ms + 64 x 0.1 ms; the server's worker does the rest itself.
  first, served = (result['points'][i]['step_seconds'] for i in (0, 7))
  assert first['fixed'] == pytest.approx(0.0072, abs=2e-6)
  assert first['compute'] == pytest.approx(0.0064, abs=2e-6)
  assert sum(served.values()) == pytest.approx(0.0136 + 0.001 + 0.002, abs=2e-6)
  point = result['points'][0]
  assert point['epoch_seconds'] == pytest.approx(1442 / 64 * 0.0136, rel=1e-5)
  assert point['device_hours'] == pytest.approx(point['run_seconds'] / 3600, rel=1e-5)
  # XLA's settings are those of a run, which main.py makes first of all.
  assert [config.model.name for config in settings] == ['lenet']
  assert handled == [('parameter_server', 32)]
  assert result['measured'].pop('batches') == [[32, 0.0104], [128, 0.02]]
  measured = {'fixed': 0.0072, 'per_image': 0.0001, 'jitter': 0.0}
  assert result['measured'] == pytest.approx(measured | {'at_worker': 0.001, 'at_server': 0.002})


_KINDS = {
  'NVIDIA L40S': 'l40s',
  'NVIDIA L4': 'l4',
  'NVIDIA H100 PCIe': 'h100-pcie',
  'NVIDIA H100 80GB HBM3': 'h100',
  'NVIDIA H200': 'h200',
  'NVIDIA A100-SXM4-80GB': 'a100-80',
  'NVIDIA A100-SXM4-40GB': 'a100-40',
  'NVIDIA A100 80GB PCIe': 'a100-80-pcie',
  'NVIDIA A100-PCIE-80GB': 'a100-80-pcie',
  'Tesla V100-SXM2-16GB': 'v100',
  'Tesla T4': 't4',
  'TPU v5 lite': 'tpu-v5e',
  'TPU v5p': 'tpu-v5p',
  'TPU v5': 'tpu-v5p',
  'TPU v4': 'tpu-v4',
  'TPU v6 lite': 'tpu-v6e',
  # Not in the table, though a name in it is a part of theirs, or begins alike.
  **dict.fromkeys(('NVIDIA RTX A1000', 'Quadro P1000', 'GRID V100D-32Q', 'Quadro K8000'), ''),
  **dict.fromkeys(('NVIDIA GH200 480GB', 'NVIDIA H20', 'NVIDIA H100 NVL', 'NVIDIA GB200'), ''),
  **dict.fromkeys(('NVIDIA A100-PCIE-40GB', 'NVIDIA A100-SXM4-40GB MIG 1g.5gb', 'NVIDIA L40'), ''),
}


@pytest.mark.parametrize('kind', _KINDS)
def test_the_measured_device_is_found(kind):
  platform = 'tpu' if kind.startswith('TPU') else 'gpu'
  measurement = device_calibration.Measurement(0.1, 0.1, 0.0, (), kind, platform, memory=7e9)
  device, is_known = device_calibration.entry(measurement, plan_tables.load(), 8)
  assert (device.name if is_known else '') == _KINDS[kind]
  assert device.gigabytes == 7  # what the device says itself


def test_devices_of_a_host_divide_its_memory_and_cores():
  measurement = device_calibration.Measurement(0.1, 0.1, 0.0, (), 'cpu', 'cpu')
  (single, _), (quarter, _) = (
    device_calibration.entry(measurement, plan_tables.load(), n) for n in (1, 4)
  )
  assert 4 * quarter.gigabytes == pytest.approx(single.gigabytes)
  assert 4 * quarter.host_cores == pytest.approx(single.host_cores)


@pytest.mark.slow
def test_a_real_step_is_timed():
  keys = {'data.image_size': '8', 'data.resize': '8', 'model.norm_group': '2'}
  keys |= {'data.source': 'synthetic', 'model.name': 'tests.user_network:WithoutDropout'}
  config = command_line.load('configs/resnet_anp.py:tiny', keys)
  measurement = device_calibration.measure(config, workload.count(config, 1000, 10), (8, 64))
  (few, low), (many, high) = measurement.batches
  assert (few, many) == (8, 64) and 0 < low and 0 < high
  assert measurement.platform == 'cpu' and measurement.per_image > 0
