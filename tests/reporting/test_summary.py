"""What a run says of itself before its first step."""

import os
import re
import types

import numpy as np
import pytest

from anp_jax.data import vocabulary
from anp_jax.reporting import summary, telemetry
from anp_jax.system import cores as cores_lib


def _run_info(config, device, devices, names, images, class_sizes):
  """The lines and records of a run."""
  lines, records = [], []
  methods = {'vocabulary': vocabulary.Vocabulary(names), '__len__': lambda _: images}
  source = type('Source', (), methods)()
  summary.log_run_info(
    types.SimpleNamespace(log=lines.append, start=records.append),
    config,
    types.SimpleNamespace(size=devices, devices=np.array([device] * devices)),
    types.SimpleNamespace(params={'w': np.zeros(3)}),
    (source, source),
    class_sizes,
  )
  return lines, records


@pytest.mark.parametrize('cores, text', [({5}, '1 core'), ({0, 5}, '2 cores')])
def test_a_run_says_what_it_is(config, monkeypatch, cores, text):
  """The cores of this process, to which Slurm, say, has bound it."""
  monkeypatch.setattr(os, 'sched_getaffinity', lambda _: cores)
  config.batch_size = 64
  gpu = types.SimpleNamespace(device_kind='NVIDIA H100', platform='gpu')
  lines, records = _run_info(config, gpu, 4, ('a', 'b'), 9, np.array([0, 9]))
  assert f'data     {config.data.source}: 9 training and 9 validation images, 2 classes' in lines
  assert 'a batch of 64 images' in lines[-2]
  assert lines[-1] == 'caution  without a training image: 1 of 2 classes, a'
  expected = {'training_images': 9, 'validation_images': 9, 'classes': '2 classes'}
  assert records == [{'data': config.data.source, **expected}]
  assert f'devices  4 x NVIDIA H100, 64 images a step, {text}' in lines
  assert 'strategy sync' in lines


def _cautions(config, names, batch_size, examples, sizes=None):
  train = types.SimpleNamespace(vocabulary=vocabulary.Vocabulary(names))
  return summary.cautions(config, train, batch_size, examples, sizes)


def test_usual_data_need_no_caution(config):
  assert _cautions(config, ('a', 'b'), 10, 10, np.array([9, 1])) == []
  assert _cautions(config, ('a', 'b'), 10, 11) == []
  config.data.source, config.data.image_size = 'folder', 224
  assert _cautions(config, ('a', 'b'), 10, 10) == []


@pytest.mark.parametrize(
  'names, batch_size, side, words',
  [
    (
      ('a', 'b'),
      11,
      72,
      ('batch of 11 images is drawn from 10: images repeat', 'config.batch_size of at most 10'),
    ),
    # A recipe for photographs, such as `paper`, says that it has none.
    (
      ('a', 'b'),
      1,
      73,
      ('of 72 px are enlarged to 73: ', '--config.data.source=folder --config.data.path=DIR'),
    ),
    (('red\u2028car',), 1, 72, (r'one class only, red\u2028car',)),
  ],
)
def test_what_is_hardly_meant(config, names, batch_size, side, words):
  config.data.source, config.data.image_size = 'anp_shapes', side
  (line,) = _cautions(config, names, batch_size, 10)
  assert all(word in line for word in words), line


def test_classes_without_training_images(config):
  names = ('a_x', 'b_x', 'c_x', 'd_y')
  (line,) = _cautions(config, names, 1, 10, np.array([0, 5, 0, 5]))
  assert line.endswith('without a training image: 2 of 4 classes, a_x, c_x')
  config.data.held_out = ('c_x',)  # as the config says
  (line,) = _cautions(config, names, 1, 10, np.array([0, 5, 0, 5]))
  assert line.endswith('1 of 4 classes, a_x')
  many = tuple(f'c{i}' for i in range(9))
  (line,) = _cautions(config, many, 1, 10, np.arange(9) // 8)
  assert line.endswith('8 of 9 classes, c0, c1, c2, c3, c4 and 3 more')


def test_a_system_that_does_not_tell_of_cores(monkeypatch):
  """macOS is one."""
  monkeypatch.delattr(os, 'sched_getaffinity')
  monkeypatch.setattr(os, 'cpu_count', lambda: 6)
  assert cores_lib.count() == 6


def test_scores_are_printed_under_their_names(capsys):
  summary.print_scores(7, {'examples': 1, 'anp_top1': 0.5, 'ece': 0.25})
  assert capsys.readouterr().out.splitlines() == [
    'checkpoint of step 7, 1 image',
    '  class_top1  50.0%',
    '  ece         25.0%',
  ]
  pairs = {'examples': 1234, 'anp_top1': 0.5, 'noun_top1': 0.75}
  summary.print_scores(7, pairs)
  assert capsys.readouterr().out.splitlines() == [
    'checkpoint of step 7, 1,234 images',
    '  anp_top1   50.0%',
    '  noun_top1  75.0%',
  ]


def test_the_report_names_the_network(config, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(summary.run_page.curves, 'plot', lambda *_: None)
  config.model.name = 'lenet'
  mesh = types.SimpleNamespace(
    size=1, devices=np.array([types.SimpleNamespace(device_kind='x86', platform='tpu')])
  )
  abstract_state = types.SimpleNamespace(params={'w': np.zeros((1000, 1234))})
  summary.report(config, str(tmp_path), mesh, abstract_state)
  text = capsys.readouterr().out
  assert re.search(r'^network +lenet$', text, re.M)
  assert re.search(r'^parameters +1,234,000$', text, re.M)
  assert re.search(r'^strategy +sync$', text, re.M)
  page = (tmp_path / 'report' / 'index.html').read_text()
  for name, value in (('network', 'lenet'), ('strategy', 'sync'), ('parameters', '1,234,000')):
    assert f'<th>{name}</th><td>{value}</td>' in page
  result = telemetry.result(str(tmp_path))
  assert (result['parameters'], result['devices']) == (1_234_000, 1)
  assert result['device'] == 'x86'
