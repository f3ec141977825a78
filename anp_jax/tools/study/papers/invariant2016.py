"""Coarse-grain parallelism that keeps convergence: Gonzalez Tallada 2016."""

import functools

from anp_jax.system import drawing
from anp_jax.tools.study.papers import drawn, lab as lab_lib, papers_page, published_figures

_SIZES = (2, 4, 8, 12, 16)
_STRATEGIES = 'sync', 'invariant'
# Data set: name, recipe, network, pixels, images a step, examples, and steps of a turn.
_NETWORKS = {
  'mnist': ('MNIST, LeNet', 'configs/lenet.py', 'lenet', 28, 64, 60_000, 20),
  'cifar10': ('CIFAR-10 full', 'configs/cifar10_full.py', 'cifar10_full', 32, 100, 50_000, 5),
}


def section(lab: lab_lib.Lab, facts: published_figures.Facts) -> papers_page.Section:
  """The paper's page."""
  results = {name: _measure(lab, name) for name in _NETWORKS}
  plans = {name: _plan(lab, name) for name in _NETWORKS}
  rows = []
  for name in _NETWORKS:
    rows += _rows(lab, facts, name, results[name], plans[name])
  return papers_page.Section(
    title='invariant2016: Coarse grain parallelization of deep neural '
    'networks (Gonzalez Tallada; PPoPP 2016)',
    question='How much faster do 2 to 16 threads train a batch of the same '
    'size, when gradients are added in a fixed order?',
    rows=rows,
    notes=[
      'The paper divides a batch over threads of one process; here it is '
      'divided over processes with a core each, joined by gloo over loopback, '
      "with Caffe's batches of 64 (MNIST) and 100 (CIFAR-10) images. The "
      'baseline is one process on one core with the whole batch.',
      'Planned: one core\'s step was timed (`--measure`) where "one core '
      'timed" stands, else it follows from the entry `cpu`; sums over loopback '
      'are an assumption of links.toml. A batch that does not divide is '
      'rounded up.',
      'Our `invariant` gives the same bits for any number of processes, which '
      "the paper's order does not: docs/strategies.md.",
    ],
    figures=[
      (
        'invariant2016',
        'speed-up by threads or processes',
        functools.partial(_draw, facts, results, plans),
      )
    ],
  )


def _measure(lab, name) -> lab_lib.Measurement:
  """Processes with a core each against one, by strategy."""
  _, _, network, size, batch, _, steps = _NETWORKS[name]
  counts = _counts(lab)
  if not counts:
    return lab_lib.Measurement(why_not=lab.too_small)
  return lab.measure(
    f'invariant2016-{name}',
    [
      '-m',
      'scripts.bench.scaling',
      f'--model={network}',
      f'--size={size}',
      f'--batch={batch // 2}',
      f'--steps={steps}',
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


def _draw(facts, results, plans, path):
  """Draws the speed-up by threads, a column for each network."""
  with drawing.figure(path, 9.5, 4, dpi=95, style=drawn.STYLE) as figure:
    axes = figure.subplots(1, 2)
    for axis, name in zip(axes, _NETWORKS):
      measured = {}
      for strategy in _STRATEGIES:
        value = results[name].get(f'{strategy}_over_one')
        measured[f'{strategy}, measured'] = {2: value} if value else {}
      drawn.speed_ups(
        axis,
        _NETWORKS[name][0],
        'threads (paper), processes (ours)',
        facts.by_size(f'speed_up_{name}'),
        {'planned': plans[name][0]},
        measured,
      )
