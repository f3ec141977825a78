"""Coarse-grain parallelism that keeps convergence: Gonzalez Tallada 2016."""

import functools
import re

from anp_jax.system import drawing
from anp_jax.tools.study.papers import drawn, lab as lab_lib, papers_page, published_figures

_SIZES = (2, 4, 8, 12, 16)
_STRATEGIES = 'sync', 'invariant'
# Data set: name, recipe, network, pixels, images a step, examples, and steps
# of a turn of the two measurements, of processes and of layers.
_NETWORKS = {
  'mnist': ('MNIST, LeNet', 'configs/lenet.py', 'lenet', 28, 64, 60_000, (20, 8)),
  'cifar10': ('CIFAR-10 full', 'configs/cifar10_full.py', 'cifar10_full', 32, 100, 50_000, (5, 4)),
}
# Parts of a step that the figure leaves out, as `layers` names them.
_SMALL = 'loss', 'no instruction running', 'activation and add'


def section(lab: lab_lib.Lab, facts: published_figures.Facts) -> papers_page.Section:
  """The paper's page."""
  results = {name: _measure(lab, name) for name in _NETWORKS}
  plans = {name: _plan(lab, name) for name in _NETWORKS}
  layers = {name: _layers(lab, name) for name in _NETWORKS}
  rows = []
  for name in _NETWORKS:
    rows += _rows(lab, facts, name, results[name], plans[name])
  return papers_page.Section(
    title='invariant2016: Coarse grain parallelization of deep neural '
    'networks (Gonzalez Tallada; PPoPP 2016)',
    question='How much faster do 2 to 16 threads train a batch of the same '
    'size, when gradients are added in a fixed order?',
    rows=rows,
    tables=[layer_table(name, result) for name, result in layers.items() if result.values],
    notes=[
      'The paper divides a batch over threads of one process; here it is '
      'divided over processes with a core each, joined by gloo over loopback, '
      "with Caffe's batches of 64 (MNIST) and 100 (CIFAR-10) images. The "
      'baseline is one process on one core with the whole batch.',
      'Planned: one core\'s step was timed (`--measure`) where "one core '
      'timed" stands, else it follows from the entry `cpu`; sums over loopback '
      'are an assumption of links.toml. A batch that does not divide is '
      'rounded up.',
      'By layer: the time of the whole batch over that of its n-th part, '
      'forward and backward, on one core. It is what a division over n could '
      'give before anything is sent or shared (memory, caches).',
      'Our `invariant` gives the same bits for any number of processes, which '
      "the paper's order does not: docs/strategies.md.",
    ],
    figures=[
      (
        'invariant2016',
        'speed-up by threads or processes, and by layer',
        functools.partial(_draw, facts, results, plans, layers),
      )
    ],
  )


def layer_table(name, result) -> tuple[str, list[tuple[str, ...]]]:
  """Speed-ups by layer, as a further table.

  Args:
    name: of the data set.
    result: of `scripts.bench.layers` with shares.

  Returns:
    A caption, and rows of texts, the first the head.
  """
  rows = [('layer', *(f'1/{n} of the batch' for n in _SIZES))]
  for layer, curve in _by_layer(result).items():
    rows.append((layer, *(f'{curve[n]:.2f}' if n in curve else '-' for n in _SIZES)))
  return f'{_NETWORKS[name][0]}, by layer ({result.hardware}):', rows


def _measure(lab, name) -> lab_lib.Measurement:
  """Processes with a core each against one, by strategy."""
  _, _, network, size, batch, _, steps = _NETWORKS[name]
  counts = _counts(lab)
  if not counts:
    return lab_lib.Measurement(why_not=lab.too_small)
  return lab.measure(
    f'invariant2016-{name}',
    [
      'scripts/bench/scaling.py',
      f'--model={network}',
      f'--size={size}',
      f'--batch={batch // 2}',
      f'--steps={steps[0]}',
      '--rounds=8',
      f'--strategies={",".join(_STRATEGIES)}',
      *([f'--processes={",".join(map(str, counts))}'] if len(counts) > 1 else []),
    ],
  )


def _counts(lab) -> list[int]:
  """Processes that have a core each here."""
  return [n for n in _SIZES if n <= lab.cores]


def _speed_up(result, strategy, size):
  """A measured speed-up; with one size its name has no number."""
  name = f'{strategy}_over_one'
  numbered = result.get(f'{size}_{name}')
  return result.get(name) if size == 2 and numbered is None else numbered


def _plan(lab, name) -> tuple[dict[int, float], str]:
  """Speed-ups by processes, and what they are predicted from."""
  _, recipe, _, _, batch, examples, _ = _NETWORKS[name]
  flags = [
    f'--config={recipe}',
    f'--nodes={",".join(map(str, (1, *_SIZES)))}',
    '--devices_per_node=1',
    '--link=loopback',
    '--strategies=sync',
    f'--config.batch_size={batch}',
    f'--examples={examples}',
    '--classes=10',
    '--config.data.source=synthetic',
  ]
  timed = lab.measure(
    f'invariant2016-{name}-core', ['-m', 'anp_jax.tools.plan', *flags, '--measure'], cores='0'
  )
  points, source = timed.get('points'), f'one core timed; {timed.hardware}'
  if not points:
    points = lab.plan(*flags, '--device=cpu')
    source = 'a core each, loopback (assumption)'
  base = points[0]['images_per_second']
  return {p['nodes']: p['images_per_second'] / base for p in points}, source


def _layers(lab, name) -> lab_lib.Measurement:
  """Each layer with parts of the batch, on one core."""
  _, _, network, size, batch, _, steps = _NETWORKS[name]
  return lab.measure(
    f'invariant2016-{name}-layers',
    [
      '-m',
      'scripts.bench.layers',
      f'--model={network}',
      f'--size={size}',
      f'--batch={batch}',
      f'--shares={",".join(map(str, (1, *_SIZES)))}',
      f'--steps={steps[1]}',
      '--rounds=3',
    ],
  )


def _by_layer(result) -> dict[str, dict[int, float]]:
  """Speed-ups by layer and number of parts, the whole step ('all') last."""
  by_layer = {}
  for key, value in (result.values or {}).items():
    match = re.fullmatch(r'(.+)_(\d+)_alone', key)
    if match:
      layer, count = match[1].replace('_', ' '), int(match[2])
      by_layer.setdefault(layer, {})[count] = value
  step = by_layer.pop('all', {})
  return by_layer | {'all': step}


def _rows(lab, facts, name, result, plan):
  curve, source = plan
  title = _NETWORKS[name][0]
  counts = _counts(lab)
  for size in _SIZES:
    is_here = size in counts
    for strategy in _STRATEGIES if is_here else _STRATEGIES[:1]:
      measured = _speed_up(result, strategy, size) if is_here else None
      yield papers_page.Row(
        f'{title}: speed-up, {size} threads' + (f', {strategy}' if is_here else ''),
        facts[f'speed_up_{name}', size],
        measured=measured,
        predicted=curve[size],
        why_not=result.why_not if is_here else lab.too_small,
        hardware=source if measured is None else result.hardware,
      )


def _drawn_layers(result) -> dict[str, dict[int, float]]:
  """Speed-ups by layer, without what is little of a step."""
  return {name: curve for name, curve in _by_layer(result).items() if name not in _SMALL}


def _draw(facts, results, plans, layers, path):
  """A column for each network: speed-up by threads; below it by layer."""
  has_layers = any(result.values for result in layers.values())
  size = (9.5, 7.6) if has_layers else (9.5, 4)
  with drawing.figure(path, *size, dpi=95, style=drawn.STYLE) as figure:
    axes = figure.subplots(1 + has_layers, 2, squeeze=False)
    for column, name in zip(axes.T, _NETWORKS):
      measured = {}
      for strategy in _STRATEGIES:
        value = results[name].get(f'{strategy}_over_one')
        measured[f'{strategy}, measured'] = {2: value} if value else {}
      drawn.speed_ups(
        column[0],
        _NETWORKS[name][0],
        'threads (paper), processes (ours)',
        facts.by_size(f'speed_up_{name}'),
        {'planned': plans[name][0]},
        measured,
      )
      if has_layers:
        drawn.speed_ups(
          column[1],
          f'{_NETWORKS[name][0]}, by layer, one core',
          'parts of the batch',
          facts.by_size(f'speed_up_{name}'),
          _drawn_layers(layers[name]),
          {},
        )
