"""Convolutions split over unequal devices: Marques, Falcao, Alexandre."""

from collections.abc import Mapping
import dataclasses
import functools
import glob
import json

from anp_jax.config import emulation_keys
from anp_jax.system import drawing
from anp_jax.tools.study import channel_split_page, channel_split_process
from anp_jax.tools.study.papers import drawn, lab as lab_lib, papers_page, published_figures

_CONFIG = 'configs/channel_split_cifar10.py'
_CPUS, _GPUS = 4, 3
_BATCHES = (64, 128, 256, 512, 1024)
_BATCH = 64  # of the planned rows
_LINKS = {'eth-1': '1 Gbit/s', 'eth-10': '10 Gbit/s'}
_SIMULATED = '1gbit', '10gbit'
# Kernels: variant of the recipe, and images of its measurement. A step of the
# largest takes 20 s of a core with 64.
_NETWORKS = {
  '50:500': ('', 64),
  '150:800': (':150x800', 64),
  '300:1000': (':300x1000', 64),
  '500:1500': (':500x1500', 16),
}
_LARGEST = '500:1500'


@dataclasses.dataclass(frozen=True)
class _Plans:
  """Predicted speed-ups over one device of the kind.

  Attributes:
    cpus: by kernels and link, by devices.
    gpus: by devices, of the largest network.
    batches: by kernels, by batch size: four CPUs.
  """

  cpus: dict[tuple[str, str], dict[int, float]]
  gpus: dict[int, float]
  batches: dict[str, dict[int, float]]


def ideal(share: float, devices: int) -> float:
  """The speed-up of `devices` if only convolutions, of this share, divide."""
  return 1 / (1 - share + share / devices)


def implied_share(speed_up: float, devices: int) -> float:
  """The least share of convolutions that allows a speed-up of `devices`."""
  return (1 - 1 / speed_up) / (1 - 1 / devices)


def section(lab: lab_lib.Lab, facts: published_figures.Facts) -> papers_page.Section:
  """The paper's page."""
  plans = _plans(lab)
  measured = {name: _measure(lab, name) for name in _NETWORKS}
  rows = [*_speed_up_rows(lab, facts, plans, measured), *_share_rows(facts, measured)]
  batches = [(f'kernels, {_CPUS} CPUs, 10 Gbit/s', *map(str, _BATCHES))]
  for name, curve in plans.batches.items():
    batches.append((name, *(f'{curve[b]:.2f}' for b in _BATCHES)))
  return papers_page.Section(
    title='uneven2017: Distributed convolutions on CPUs and GPUs '
    '(Marques, Falcao, Alexandre; arXiv 1712.02546)',
    question='How much faster is a network of two convolutional layers, on '
    'CIFAR-10, when each device computes some of the kernels?',
    rows=rows,
    tables=[
      ('Speed-up over one device, planned, by images a step:', batches),
      *_measured_tables(measured),
    ],
    notes=[
      "The paper's devices are not known: the planner's CPU is one core with "
      'AVX-512, its GPU a K80 on PCIe (assumptions). Devices are alike; for '
      'unequal ones see docs/strategies.md, channel_split.',
      'Least share: of the convolutions in a step of one device that the '
      'published speed-up implies, (1 - 1 / s) / (1 - 1 / n), as if sending '
      'took no time. Measured is the share of the network named.',
      'Measured steps are whole steps over one device alone, the other idle, '
      'with the plan of `channel_split`; its cost model, fitted to two cores, '
      'predicts more of them in a ring of links.',
    ],
    figures=[
      (
        'uneven2017',
        'speed-up by devices, and by kernels and batch',
        functools.partial(_draw, facts, plans, measured),
      )
    ],
  )


def costs(output: str, folder: str) -> dict:
  """The ratios of a study, and predictions from what it measured.

  Returns:
    `ratios`, see `channel_split`; `simulated`: by link, (devices, speed-up).
  """
  links = {x: emulation_keys.bytes_per_second(x) for x in _SIMULATED}
  simulated = {}
  for path in glob.glob(f'{folder}/*/{channel_split_process.FILE}'):
    with open(path) as f:
      for values in json.load(f):
        run = channel_split_page.Run.from_json('', 2, values)
        simulated = run.curves(links)['links']
  return {'ratios': lab_lib.last_json(output, folder), 'simulated': simulated}


def _measure(lab, name) -> lab_lib.Measurement:
  """Two processes of this machine, a core each."""
  variant, images = _NETWORKS[name]
  if lab.cores < 2:
    return lab_lib.Measurement(why_not=lab.too_small)
  return lab.measure(
    f'uneven2017-{name.replace(":", "x")}',
    [
      '-m',
      'anp_jax.tools.study',
      'channel_split',
      f'--config={_CONFIG}{variant}',
      '--workdir={folder}',
      '--devices=2',
      f'--batch_sizes={images}',
      '--rounds=3',
      '--brief',
      '--config.strategy.batch_layers=False',
    ],
    costs,
  )


def _ratios(measurement) -> Mapping[str, float]:
  """The ratios of a measurement's only run; {} of none."""
  for values in (measurement.get('ratios') or {}).values():
    if isinstance(values, dict):
      return values
  return {}


def _plans(lab) -> _Plans:
  """Predictions of the planner."""
  cpus = {}
  for name in _NETWORKS:
    for link in _LINKS:
      if name == _LARGEST or link == 'eth-10':
        cpus[name, link] = _speed_ups(
          lab,
          name,
          '--device=cpu',
          '--nodes=1,2,3,4,8,16',
          '--devices_per_node=1',
          f'--link={link}',
        )
  rates = {}
  for count in range(1, _GPUS + 1):
    (point,) = _points(lab, _LARGEST, '--device=k80', '--nodes=1', f'--devices_per_node={count}')
    rates[count] = point['images_per_second']
  batches = {}
  for name in _NETWORKS:
    batches[name] = {
      images: _speed_ups(
        lab,
        name,
        '--device=cpu',
        f'--nodes=1,{_CPUS}',
        '--devices_per_node=1',
        '--link=eth-10',
        images=images,
      )[_CPUS]
      for images in _BATCHES
    }
  gpus = {n: rate / rates[1] for n, rate in rates.items()}
  return _Plans(cpus, gpus, batches)


def _speed_ups(lab, name, *flags, images=_BATCH) -> dict[int, float]:
  points = _points(lab, name, *flags, images=images)
  base = points[0]['images_per_second']
  return {p['devices']: p['images_per_second'] / base for p in points}


def _points(lab, name, *flags, images=_BATCH) -> list[dict]:
  return lab.plan(
    f'--config={_CONFIG}{_NETWORKS[name][0]}',
    *flags,
    '--strategies=channel_split',
    f'--config.batch_size={images}',
    '--examples=50000',
    '--classes=10',
    '--config.data.source=synthetic',
  )


def _speed_up_rows(lab, facts, plans, measured):
  four, three = facts['speed_up_cpus', _CPUS], facts['speed_up_gpus', _GPUS]
  for link, text in _LINKS.items():
    yield papers_page.Row(
      f'speed-up, {_CPUS} CPUs, {_LARGEST}, {_BATCH} images, {text}',
      four,
      predicted=plans.cpus[_LARGEST, link][_CPUS],
      why_not=lab.two_devices,
      hardware=f'a core each, {text} (assumption)',
    )
  for name, result in measured.items():
    for link, points in (result.get('simulated') or {}).items():
      yield papers_page.Row(
        f'speed-up, {_CPUS} CPUs, {name}, {_NETWORKS[name][1]} images, {link}',
        four if name == _LARGEST else None,
        predicted=dict(points)[_CPUS],
        by='cost model',
        why_not=lab.two_devices,
        unit='x',
        hardware=f'cores like those of {result.hardware}; links: {link}',
      )
  yield papers_page.Row(
    f'speed-up, {_GPUS} GPUs, {_LARGEST}, {_BATCH} images',
    three,
    predicted=plans.gpus[_GPUS],
    hardware='K80, PCIe 3 (assumption)',
    why_not='not run, because this study measures on CPUs',
  )
  for name, result in measured.items():
    _, images = _NETWORKS[name]
    yield papers_page.Row(
      f'speed-up, 2 CPUs, {name}, {images} images',
      measured=_ratios(result).get('over_alone'),
      why_not=result.why_not,
      predicted=plans.cpus[name, 'eth-10'][2],
      unit='x',
      hardware=result.hardware or 'a core each, 10 Gbit/s (assumption)',
    )


def _share_rows(facts, measured):
  # The largest network that was measured; they are in order of their size.
  names = [name for name, result in measured.items() if _ratios(result)]
  name = names[-1] if names else _LARGEST
  result = measured[name]
  share = _ratios(result).get('convolution_share')
  percent = None if share is None else 100 * share
  for quantity in ('convolution_share_least', 'convolution_share_most'):
    yield papers_page.Row(
      f'{quantity.replace("_", " ")}, ours: {name}',
      facts[quantity],
      measured=percent,
      why_not=result.why_not,
      hardware=result.hardware,
    )
  for quantity, count in (('speed_up_cpus', _CPUS), ('speed_up_gpus', _GPUS)):
    fact = facts[quantity, count]
    least = 100 * implied_share(fact.value, count)
    derived = published_figures.Fact(
      fact.paper, 'share', count, f'{least:.1f}', '%', 'd', fact.statement
    )
    yield papers_page.Row(
      f'least share of convolutions for {fact.text} on {count}, ours: {name}',
      derived,
      measured=percent,
      why_not=result.why_not,
      hardware=result.hardware,
    )
  yield papers_page.Row(
    'accuracy of split training',
    facts['accuracy'],
    why_not='not run by this study: tests/parallel/test_channel_split.py '
    'holds equal weights, to the rounding of a sum',
  )


def _measured_tables(measured):
  """All ratios of what was measured."""
  head = (
    'kernels',
    'images',
    'convolutions of a step',
    'over one alone',
    'of the ideal',
    'over equal shares',
  )
  rows = [head]
  for name, result in measured.items():
    ratios = _ratios(result)
    if ratios:
      rows.append(
        (
          name,
          str(_NETWORKS[name][1]),
          f'{100 * ratios["convolution_share"]:.0f} %',
          *(f'{ratios[k]:.2f}' for k in ('over_alone', 'of_ideal', 'over_equal_shares')),
        )
      )
  return [('Measured, two processes with a core each:', rows)] * (len(rows) > 1)


def _draw(facts, plans, measured, path):
  """Speed-up by devices; by kernels and batch."""
  with drawing.figure(path, 11, 4.2, dpi=110, style=drawn.STYLE) as figure:
    left, right = figure.subplots(1, 2)
    curves = {
      f'{_LARGEST}, CPUs, {text}': plans.cpus[_LARGEST, link] for link, text in _LINKS.items()
    }
    curves[f'{_LARGEST}, GPUs'] = plans.gpus
    overs = {}
    for name, result in measured.items():
      over = _ratios(result).get('over_alone')
      if over:
        overs[f'{name}, measured'] = {2: over}
        points = result.get('simulated', 'as measured here') or ()
        curves[f'{name}, cost model'] = {n: s for n, s in points if n <= 16}
    drawn.speed_ups(
      left,
      'Speed-up by devices',
      'devices',
      {**facts.by_size('speed_up_cpus'), **facts.by_size('speed_up_gpus')},
      curves,
      overs,
    )
    for (name, curve), colour in zip(plans.batches.items(), drawing.COLOURS):
      right.plot(
        list(curve),
        list(curve.values()),
        'o-',
        color=colour,
        label=f'{name}, {_CPUS} CPUs, planned',
        markersize=4,
        markerfacecolor='none',
      )
      over = _ratios(measured[name]).get('over_alone')
      if over:
        right.plot(
          [_NETWORKS[name][1]], [over], 'X', color=colour, label=f'{name}, 2 CPUs, measured'
        )
    right.axhline(
      facts['speed_up_cpus', _CPUS].value,
      linestyle='--',
      color=drawing.GREY,
      label='published, 4 CPUs',
    )
    right.set(
      title='Speed-up by kernels and batch', xlabel='images a step', xscale='log', ylim=(0, None)
    )
    images = sorted({*_BATCHES, *(b for _, b in _NETWORKS.values())})
    right.set_xticks(images, [str(b) for b in images])
    right.minorticks_off()
    right.legend(fontsize=7)
