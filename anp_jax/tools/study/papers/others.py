"""Poseidon and MiMatrix."""

import functools

from anp_jax.system import drawing
from anp_jax.tools.study.papers import drawn, lab as lab_lib, papers_page, published_figures

_NODES = (1, 2, 4, 8, 16, 32)
_DEVICES = {'k80': 'K80', 'p100-pcie': 'P100'}
_HEADS = ((2048, 1200), (4096, 4096), (800, 500))  # ResNet-50, VGG, LeNet
_BATCH, _WORKERS = 32, 16
_TARGET = 'cpu:2'


def factors(rows: int, columns: int, batch: int, workers: int) -> float:
  """Numbers sent as sufficient factors over those of the gradient.

  Poseidon's rule, for servers next to workers: 2 K (P - 1) (M + N) numbers of
  factors, 2 M N (2 P - 2) / P of the gradient.

  Args:
    rows: M, of a fully connected layer.
    columns: N.
    batch: K, of a worker.
    workers: P.
  """
  as_factors = 2 * batch * (workers - 1) * (rows + columns)
  as_gradient = 2 * rows * columns * (2 * workers - 2) / workers
  return as_factors / as_gradient


def section(lab: lab_lib.Lab, facts: published_figures.Facts) -> papers_page.Section:
  """The page of both papers."""
  plans = {device: _plan(lab, device) for device in _DEVICES}
  rows = [*_poseidon_rows(lab, facts, plans), _synchronisations(lab, facts)]
  table = [('fully connected layer', 'factors over gradient', 'sent')]
  for m, n in _HEADS:
    ratio = factors(m, n, _BATCH, _WORKERS)
    table.append((f'{m} x {n}', f'{ratio:.2f}', 'factors' if ratio <= 1 else 'gradient'))
  return papers_page.Section(
    title='others: Poseidon and MiMatrix',
    question='What do gradients gain that leave while the backward pass goes '
    'on, and how often does a step wait for all?',
    rows=rows,
    tables=[
      (
        f"Poseidon's rule, {facts['poseidon_factors'].text}, {_BATCH} images a "
        f'worker, {_WORKERS} workers:',
        table,
      )
    ],
    notes=[
      "Poseidon's machines are not known: one GPU each, "
      f'{facts["poseidon_gigabits"].text} Gbit/s Ethernet, ResNet-50 at 224 px '
      f'in float32, {_BATCH} images each (assumptions). The planner lets the '
      'backward pass hide half of the sums at most.',
      'Our gradients leave in buckets as soon as they are there; on a CPU XLA '
      'joins them to one sum, which waits for the backward pass. Sufficient '
      'factors are not built: gradients are always sent.',
    ],
    figures=[('others', 'speed-up by machines', functools.partial(_draw, facts, plans))],
  )


def _plan(lab, device) -> dict[int, float]:
  """Speed-ups of synchronous training by machines."""
  points = lab.plan(
    '--config=configs/resnet_anp.py:paper',
    f'--device={device}',
    f'--nodes={",".join(map(str, _NODES))}',
    '--devices_per_node=1',
    '--link=eth-10',
    '--strategies=sync',
    '--weak',
    '--examples=1281167',
    '--classes=1000',
    '--config.data.source=synthetic',
  )
  base = points[0]['images_per_second']
  return {p['nodes']: p['images_per_second'] / base for p in points}


def _poseidon_rows(lab, facts, plans):
  for device, curve in plans.items():
    hardware = f'one {_DEVICES[device]} a machine, 10 Gbit/s (assumption)'
    yield papers_page.Row(
      f'Poseidon: speed-up, 16 machines; ours: ResNet-50, {_DEVICES[device]}',
      facts['poseidon_speed_up', 16],
      predicted=curve[16],
      hardware=hardware,
      why_not=lab.no_cluster,
    )
  yield papers_page.Row(
    'Poseidon: Inception-V3, 32 machines',
    facts['poseidon_inception_v3', 32],
    why_not='not run, because the package has no Inception-V3',
  )
  for device, curve in plans.items():
    hardware = f'one {_DEVICES[device]} a machine, 10 Gbit/s (assumption)'
    yield papers_page.Row(
      f'ResNet-50 instead, 32 machines, {_DEVICES[device]}',
      predicted=curve[32],
      unit='x',
      hardware=hardware,
      why_not=lab.no_cluster,
    )


def _synchronisations(lab, facts) -> papers_page.Row:
  """Collectives in the compiled step of two devices."""
  result = lab.measure(
    'others-collectives',
    [
      '-m',
      'anp_jax.tools.portability',
      '--config=configs/lenet.py',
      '--config.data.source=synthetic',
      f'--target={_TARGET}',
    ],
  )
  compiled = result.get('targets', _TARGET, 'train', 'compiled')
  count = None
  if compiled:
    count = sum(c['operations'] for c in compiled)
  return papers_page.Row(
    "MiMatrix: synchronisations a step; ours: collectives of LeNet's compiled step",
    facts['mimatrix_synchronisations'],
    measured=count,
    why_not=result.why_not,
    hardware=result.hardware,
  )


def _draw(facts, plans, path):
  """Speed-up by machines."""
  with drawing.figure(path, 5.5, 4, dpi=110, style=drawn.STYLE) as figure:
    points = {**facts.by_size('poseidon_speed_up'), **facts.by_size('poseidon_inception_v3')}
    drawn.speed_ups(
      figure.subplots(),
      'Poseidon, 10 Gbit/s Ethernet',
      'machines',
      points,
      {f'{_DEVICES[d]}, ResNet-50, planned': c for d, c in plans.items()},
      {},
    )
