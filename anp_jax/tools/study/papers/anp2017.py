"""Distributed ANP classification on a GPU cluster: Torres et al. 2017."""

import dataclasses
import functools
import os

from anp_jax.config import command_line
from anp_jax.system import drawing
from anp_jax.tools.study.papers import drawn, lab as lab_lib, papers_page, published_figures

_NODES = (1, 2, 4, 8, 16)
_GPUS = 4
_LINKS = {'eth-10': '10 Gbit/s Ethernet', 'ib-fdr56': 'InfiniBand FDR'}
_QUARTERS = os.path.join(os.path.dirname(__file__), 'quarter_links.toml')
_SERVERS = 4
# The emulated cluster: time runs so many times slower, and gradients and links are a part
# as large, so that this machine's own cost is small in a step.
_SLOWER, _PART = 5, 20
_EMULATED_LINK = 'eth-10'
_GIGABITS = 10
_STEPS = 12
# Names of the planner's strategies.
_WAYS = {
  'sync': 'synchronous, all-reduce',
  'parameter_server:synchronous': f'synchronous, {_SERVERS} servers',
  'parameter_server:async': f'mixed, {_SERVERS} servers',
}
_PER_GPU = 'asynchronous, a worker per GPU'
_RECIPE = 'configs/resnet_anp.py:paper'
# Key of the recipe, by the quantity published.
_SETTINGS = {
  'pixels': 'data.image_size',
  'shorter_side_least': 'data.scale_range.0',
  'shorter_side_most': 'data.scale_range.1',
  'batch_accelerator': 'batch_size_per_device',
  'learning_rate': 'optimizer.learning_rate',
  'learning_rate_factor': 'schedule.factor',
  'learning_rate_epochs': 'schedule.every',
  'rmsprop_decay': 'optimizer.decay',
  'momentum': 'optimizer.momentum',
  'rmsprop_epsilon': 'optimizer.eps',
  'weight_decay': 'optimizer.weight_decay',
  'clip_value': 'optimizer.clip_value',
  'averaging_decay': 'ema',
}


@dataclasses.dataclass(frozen=True)
class _Curves:
  """Speed-ups over one synchronous node, by name and nodes.

  Attributes:
    planned: by the planner.
    emulated: by the emulator, of those measured.
    node_seconds: of a step of one node, predicted.
    single: speed-up of a node's GPUs over one GPU, predicted.
    why_not: why nothing is emulated; '': something is.
    hardware: of the emulator.
  """

  planned: dict[str, dict[int, float]]
  emulated: dict[str, dict[int, float]]
  node_seconds: float
  single: float
  why_not: str
  hardware: str


def section(lab: lab_lib.Lab, facts: published_figures.Facts) -> papers_page.Section:
  """The paper's page."""
  curves = _curves(lab, facts)
  two_cores = _real(lab)
  rows = [
    *_speed_up_rows(lab, facts, curves),
    *_hours_rows(lab, facts, curves),
    *_accuracy_rows(facts, two_cores),
  ]
  by_nodes = [('speed-up over one node', *map(str, _NODES))]
  for kind, group in (('planner', curves.planned), ('emulator', curves.emulated)):
    for name, curve in group.items():
      by_nodes.append(
        (f'{name} ({kind})', *(f'{curve[n]:.2f}' if n in curve else '-' for n in _NODES))
      )
  return papers_page.Section(
    title='anp2017: Distributed ANP classification on a GPU cluster '
    '(Torres, Campos, Sastre, Yagües, Giró-i-Nieto; CCGrid and ICCS 2017)',
    question='How fast is a ResNet-50 for 1,200 Adjective-Noun Pairs on up to '
    '16 nodes of 4 GPUs, synchronously, asynchronously or mixed?',
    rows=rows,
    tables=[
      ('By nodes, 32 images a GPU:', by_nodes),
      (f'The recipe, `{_RECIPE}`:', _settings(facts)),
      *_real_tables(two_cores),
    ],
    notes=_notes(curves),
    figures=[
      ('anp2017', 'speed-up by nodes, and hours to train', functools.partial(_draw, facts, curves))
    ],
  )


def _curves(lab, facts) -> _Curves:
  """Predictions, and what the emulator measured."""
  planned, single = {}, 1.0
  by_link = {link: _plan(lab, facts, link) for link in _LINKS}
  for link, points in by_link.items():
    base = points['sync', 1]['images_per_second']
    for strategy, name in _WAYS.items():
      planned[f'{name}, {_LINKS[link]}'] = {
        n: points[strategy, n]['images_per_second'] / base for n in _NODES
      }
    # A server's worker is a node's devices: here each GPU is a node of its own.
    alone = _plan(lab, facts, f'{link}-quarter', _GPUS)
    planned[f'{_PER_GPU}, {_LINKS[link]}'] = {
      n: alone['parameter_server:async', n * _GPUS]['images_per_second'] / base for n in _NODES
    }
    single = base / alone['sync', 1]['images_per_second']
  node = by_link[_EMULATED_LINK]['sync', 1]
  seconds = sum(node['step_seconds'].values())
  emulated, why_not, hardware = _emulated(lab, facts, seconds)
  return _Curves(planned, emulated, seconds, single, why_not, hardware)


def _plan(lab, facts, link, split=1) -> dict:
  """Points by strategy and nodes, each node divided into `split` of them."""
  nodes = sorted({1, *(n * split for n in _NODES)})
  points = lab.plan(
    f'--config={_RECIPE}',
    '--device=k80',
    f'--nodes={",".join(map(str, nodes))}',
    f'--devices_per_node={_GPUS // split}',
    f'--link={link}',
    f'--entries={os.path.relpath(_QUARTERS)}',
    f'--strategies={",".join(_WAYS)}',
    '--weak',
    f'--examples={facts["training_images"].text}',
    f'--classes={facts["pairs"].text}',
    '--config.data.source=synthetic',
    f'--config.strategy.servers={_SERVERS * split}',
  )
  return {(p['strategy'], p['nodes']): p for p in points}


def _emulated(lab, facts, node_seconds):
  """Speed-ups of emulated nodes; why there are none; where they ran."""
  rates, why_not, hardware = {}, '', ''
  seconds = round(_SLOWER * node_seconds, 1)
  megabytes = round(facts['gradient_megabytes'].value / _PART, 1)
  link = f'{_GIGABITS * 1000 / _PART / _SLOWER:g}mbit'
  for strategy in ('sync', 'parameter_server'):
    for nodes in _NODES:
      if strategy == 'parameter_server' and nodes == 1:
        continue  # the baseline is one synchronous node
      steps = _STEPS if strategy == 'sync' else 8 * nodes
      command = [
        '-m',
        'anp_jax.tools.study',
        'strategies',
        '--config=configs/lenet.py',
        '--workdir={folder}',
        f'--nodes={nodes}',
        f'--strategies={strategy}',
        f'--emulate=step_seconds={seconds},spread=0.005,megabytes={megabytes},bandwidth={link}',
        '--config.batch_size=0',
        '--config.data.synthetic_classes=10',
        f'--config.batch_size_per_device={facts["batch_node", _GPUS].text}',
        f'--config.duration={steps} steps',
        f'--config.log.every={steps // 4} steps',
        '--config.optimizer.momentum=0',
      ]
      if strategy == 'parameter_server':
        servers = min(_SERVERS, nodes)
        command.append(f'--config.strategy.servers={servers}')
      result = lab.measure(f'anp2017-emulated-{strategy}-{nodes}', command, lab_lib.cells)
      rate = result.get('cells', 0, 'images_per_second')
      hardware = result.hardware or hardware
      why_not = result.why_not or why_not
      if rate:
        rates[strategy, nodes] = float(rate)
  base = rates.get(('sync', 1))
  if not base:
    return {}, why_not or 'not run', hardware
  text = _LINKS[_EMULATED_LINK]
  names = {
    'sync': f'{_WAYS["sync"]}, {text}',
    'parameter_server': f'{_WAYS["parameter_server:async"]}, {text}',
  }
  curves = {
    name: {n: r / base for (s, n), r in rates.items() if s == strategy}
    for strategy, name in names.items()
  }
  return {n: c for n, c in curves.items() if c}, '', hardware


def _real(lab) -> lab_lib.Measurement:
  """LeNet on real processes: speed and accuracy by strategy and nodes."""
  command = (
    '-m anp_jax.tools.study strategies --config=configs/lenet.py --workdir={folder} '
    '--nodes=1,2,4 --strategies=sync,parameter_server --seeds=0'
  )
  return lab.measure('anp2017-accuracy', command.split(), lab_lib.cells)


def _hardware(link) -> str:
  return f'nodes of {_GPUS} K80 GPUs, {_LINKS[link]} (assumption)'


def _speed_up_rows(lab, facts, curves):
  paper = facts['speed_up', _NODES[-1]]
  for link, text in _LINKS.items():
    for name, curve in curves.planned.items():
      if name.endswith(text) and _NODES[-1] in curve:
        yield papers_page.Row(
          f'speed-up, {_NODES[-1]} nodes: {name}',
          paper,
          predicted=curve[_NODES[-1]],
          hardware=_hardware(link),
          why_not=lab.no_cluster,
        )
  for name, curve in curves.emulated.items():
    if _NODES[-1] in curve:
      yield papers_page.Row(
        f'speed-up, {_NODES[-1]} nodes, emulated: {name}',
        paper,
        predicted=curve[_NODES[-1]],
        by='emulator',
        hardware=curves.hardware,
        why_not=lab.no_cluster,
      )
  if not curves.emulated:
    yield papers_page.Row(f'speed-up, {_NODES[-1]} nodes, emulated', paper, why_not=curves.why_not)
  name = f'{_WAYS["sync"]}, {_LINKS[_EMULATED_LINK]}'
  yield papers_page.Row(
    f'efficiency, {_NODES[-1]} nodes: {name}',
    facts['efficiency', _NODES[-1]],
    predicted=curves.planned[name][_NODES[-1]] / _NODES[-1],
    hardware=_hardware(_EMULATED_LINK),
    why_not=lab.no_cluster,
  )
  yield papers_page.Row(
    f'speed-up within a node, {_GPUS} GPUs',
    facts['within_node', _GPUS],
    predicted=curves.single,
    hardware=_hardware(_EMULATED_LINK),
    unit='x',
    why_not='not run, because this study measures on CPUs',
  )


def _hours_rows(lab, facts, curves):
  start = facts['hours', 1].value
  text = _LINKS[_EMULATED_LINK]
  for paper, name in (
    (facts['hours', _NODES[-1]], f'{_WAYS["parameter_server:async"]}, {text}'),
    (facts['hours_sync', _NODES[-1]], f'{_WAYS["sync"]}, {text}'),
  ):
    for by, how, group in (
      ('planner', '', curves.planned),
      ('emulator', ', emulated', curves.emulated),
    ):
      if _NODES[-1] in group.get(name, {}):
        yield papers_page.Row(
          f'hours to train, {_NODES[-1]} nodes{how}: {name}',
          paper,
          predicted=start / group[name][_NODES[-1]],
          by=by,
          why_not=lab.no_cluster,
          hardware=curves.hardware if by == 'emulator' else _hardware(_EMULATED_LINK),
        )
  for quantity, name in (
    ('speed_up_to_result_sync', f'{_WAYS["sync"]}, {text}'),
    ('speed_up_to_result_mixed', f'{_WAYS["parameter_server:async"]}, {text}'),
  ):
    yield papers_page.Row(
      f'speed-up in time to the result, {_NODES[-1]} nodes: {name}',
      facts[quantity, _NODES[-1]],
      predicted=curves.planned[name][_NODES[-1]],
      hardware=_hardware(_EMULATED_LINK),
      why_not=lab.no_cluster,
    )


def _accuracy_rows(facts, result):
  """Whether strategies keep the accuracy of one node."""
  scores = {
    (c['strategy'], int(c['nodes'])): float(c['accuracy'])
    for c in result.get('cells') or ()
    if c['accuracy']
  }
  text = None
  if ('sync', 1) in scores:
    losses = [
      f'{strategy}, {nodes} nodes: '
      + (
        f'{100 * (scores[strategy, nodes] - scores["sync", 1]):+.1f} points'
        if (strategy, nodes) in scores
        else 'did not come to its end'
      )
      for strategy in ('sync', 'parameter_server')
      for nodes in (2, 4)
    ]
    text = '; '.join(losses)
  yield papers_page.Row(
    'keeps the accuracy of one node',
    facts['keeps_accuracy', _NODES[-1]],
    measured=text,
    why_not=result.why_not,
    hardware=result.hardware and f'LeNet, digits; {result.hardware}',
  )
  for quantity, fact in facts.quantities().items():
    if fact.unit == '%':
      _, what, top = quantity.split('_')
      yield papers_page.Row(
        f'VSO subset, {what}, {top}', fact, why_not='not run, because its photographs are not here'
      )


def _real_tables(result):
  """Real processes of this machine, as a further table."""
  rows = result.get('cells')
  if not rows:
    return []
  table = [('LeNet on digits', 'nodes', 'accuracy')]
  for c in rows:
    score = f'{100 * float(c["accuracy"]):.1f} %' if c['accuracy'] else ''
    table.append((c['strategy'], c['nodes'], score or c['error']))
  return [(f'Real processes, 20 epochs, one seed ({result.hardware}):', table)]


def _settings(facts) -> list[tuple[str, ...]]:
  """The published settings, and those of our recipe."""
  overrides = {'data.source': 'synthetic'}
  config = command_line.load(_RECIPE, overrides)
  rows = [('setting', 'paper', 'ours')]
  for quantity, key in _SETTINGS.items():
    value = config
    for name in key.split('.'):
      value = value[int(name)] if name.isdigit() else value[name]
    fact = facts.quantities()[quantity]
    rows.append((quantity.replace('_', ' '), str(fact), str(value)))
  return rows


def _notes(curves) -> list[str]:
  hours = 'the published 106 h of one node, divided by our speed-up'
  return [
    'The baseline of every speed-up is one synchronous node. Device and '
    "network are assumptions: the planner's K80, which has published rates of "
    'ResNet-50, and two networks of the time. No image is decoded.',
    f"A node's step takes {curves.node_seconds:.3f} s (planner). The emulated "
    f'cluster runs {_SLOWER} times slower, with gradients and links '
    f'{_PART} times smaller: one process a node, over '
    f'{_LINKS[_EMULATED_LINK]} to scale.',
    'Mixed: synchronous among the GPUs of a node, asynchronous between nodes, '
    f'over {_SERVERS} parameter servers on the first nodes. Published is that '
    'servers were on nodes of their own or alongside workers, not how many.',
    f'Our hours to train are {hours}: to the same number of images, not to the '
    "same accuracy. The paper's are to its result.",
  ]


def _draw(facts, curves, path):
  """Speed-up by nodes; hours to train by nodes."""
  with drawing.figure(path, 11, 4.4, dpi=110, style=drawn.STYLE) as figure:
    left, right = figure.subplots(1, 2)
    short = {name: curve for name, curve in curves.planned.items() if not name.startswith(_PER_GPU)}
    emulated = {f'{n} (emulator)': c for n, c in curves.emulated.items()}
    drawn.speed_ups(
      left, 'Speed-up over one node of 4 GPUs', 'nodes', facts.by_size('speed_up'), short, emulated
    )
    start = facts['hours', 1].value
    for (name, curve), colour in zip(short.items(), drawing.COLOURS):
      right.plot(
        list(curve),
        [start / s for s in curve.values()],
        'o-',
        color=colour,
        label=name,
        markersize=4,
        markerfacecolor='none',
      )
    for quantity, marker, label in (
      ('hours', 'D', 'published; on 16 nodes mixed'),
      ('hours_sync', 's', 'published, synchronous'),
    ):
      points = facts.by_size(quantity)
      right.plot(
        list(points),
        list(points.values()),
        marker,
        markersize=7,
        color=drawing.INK,
        markerfacecolor='none',
        label=label,
      )
    right.set(title='Hours to train', xlabel='nodes', yscale='log')
    right.set_yticks([5, 10, 20, 50, 100], ['5', '10', '20', '50', '100'])
    right.minorticks_off()
    drawn.ticks(right, list(_NODES))
    right.legend(fontsize=8)
