"""Many models in a pipeline: Chen et al., ISM 2015."""

import functools

from anp_jax.runtimes.model_ring import schedule
from anp_jax.system import drawing
from anp_jax.tools.study import hours
from anp_jax.tools.study.papers import drawn, lab as lab_lib, papers_page, published_figures

# (models, accelerators, epochs)
_CASES = ((2, 4, 10), (4, 4, 10), (16, 4, 10), (4, 2, 3), (64, 16, 90))
_STATION_COUNT, _EPOCHS = 4, 10  # of the figure
# A planned run: photographs of 110 KB, ResNet-50 on a K80, one model a station.
_SETS = (10, 50, 150, 500, 1000)  # GB
_LINKS = {'1 Gbit/s': 125e6, '10 Gbit/s': 1.25e9}
_RUN_EPOCHS, _STATIONS = 90, 4
_IMAGE_BYTES = 110e3
_STATE_BYTES = 205e6  # ResNet-50's weights and momentum in float32
_DOZEN = 12
_BASELINES = {
  'parts': 'a model a station, data migrates (the baseline)',
  'disk': 'a model a station, which reads the whole set from disk',
}
# The measured run, and the set for which its rates predict hours.
_MODELS = 'seed=1', 'seed=2', 'seed=3'
_MEASURED_SET, _DISK = 500, 200  # GB, MB/s
# Ways that are measured, as `model_ring` names them.
_WAYS = {
  'parts travel': _BASELINES['parts'],
  'whole set from disk': _BASELINES['disk'],
  'whole set in memory': 'a model a station, which has the set in memory',
  'one after another': 'models one after another, batches divided',
}


def hours_saved(data_bytes: float, bandwidth: float, image_seconds: float) -> dict[str, float]:
  """Hours that a ring saves against the baselines, in the planned run.

  Args:
    data_bytes: of the set.
    bandwidth: bytes a second, of a station's link and of the shared disk.
    image_seconds: of a station, for an image of the set.
  """
  load = hours.Load(_STATIONS, _STATIONS, _RUN_EPOCHS, data_bytes, bandwidth)
  epoch = data_bytes / _IMAGE_BYTES * image_seconds
  by_way = load.hours(
    {
      'ring': hours.Rate(epoch, _STATE_BYTES / bandwidth),
      'parts': hours.Rate(epoch, data_bytes / _STATIONS / bandwidth),
      'disk': hours.Rate(epoch),
    }
  )
  return {way: by_way[way] - by_way['ring'] for way in _BASELINES}


def section(lab: lab_lib.Lab, facts: published_figures.Facts) -> papers_page.Section:
  """The paper's page."""
  result = _measure(lab)
  seconds = _image_seconds(lab)
  saved = {
    (name, size): hours_saved(1e9 * size, bandwidth, seconds)
    for name, bandwidth in _LINKS.items()
    for size in _SETS
  }
  table = [('hours saved, by GB of the set', *(f'{s:,}' for s in _SETS))]
  for way, title in _BASELINES.items():
    for name in _LINKS:
      values = (f'{saved[name, size][way]:.1f}' for size in _SETS)
      table.append((f'against {title}; {name}', *values))
  return papers_page.Section(
    title='ring2015: Training many models in a pipeline (Chen, Lee, Xia, Lin, '
    'Suzumura, Lin; ISM 2015)',
    question='How long do many models take that travel between accelerators '
    'which keep their parts of the data?',
    rows=[*_slot_rows(facts), *_time_rows(facts, result, saved)],
    tables=[(f'Planned: {_STATIONS} models on {_STATIONS} stations, {_RUN_EPOCHS} epochs:', table)],
    notes=[
      'M models, N accelerators, E epochs. Slots are those of our schedule, '
      "counted; their formula is the paper's.",
      'Planned hours follow the formulas at the head of anp_jax/tools/study/hours.py '
      f'with K80 stations (planner: {1e3 * seconds:.1f} ms an image of '
      f'ResNet-50), photographs of {_IMAGE_BYTES / 1e3:.0f} KB, and links and '
      'a shared disk of the bandwidth named (assumptions). Nothing hides what '
      "the baseline sends; reading from disk overlaps computing. The paper's "
      'set, network and link are not known.',
      'Measured: three LeNets on two processes of this machine, three epochs of the embedded set.',
    ],
    figures=[
      ('ring2015', 'slots by models, and hours saved', functools.partial(_draw, facts, saved))
    ],
  )


def _image_seconds(lab) -> float:
  """Seconds of a K80 for an image of ResNet-50."""
  (point,) = lab.plan(
    '--config=configs/resnet_anp.py:paper',
    '--device=k80',
    '--nodes=1',
    '--devices_per_node=1',
    '--strategies=sync',
    '--weak',
    '--examples=1281167',
    '--classes=1000',
    '--config.data.source=synthetic',
  )
  return 1 / point['images_per_second']


def _measure(lab) -> lab_lib.Measurement:
  """A ring of two processes, and its rivals."""
  if lab.cores < 2:
    return lab_lib.Measurement(why_not=lab.too_small)
  return lab.measure(
    'ring2015-ring',
    [
      '-m',
      'anp_jax.tools.study',
      'model_ring',
      '--config=configs/model_ring_anp.py',
      '--workdir={folder}',
      '--stations=2',
      '--config.model.name=lenet',
      f'--config.strategy.models={_MODELS}',
      '--config.optimizer.learning_rate=0.01',
      '--config.duration=3 epochs',
      '--baselines=ring,sync,parts,independent,disk',
      f'--data_set_gigabytes={_MEASURED_SET}',
      f'--disk_megabytes_per_second={_DISK}',
    ],
  )


def _slot_rows(facts):
  for models, stations, epochs in _CASES:
    count = len(schedule.slots(models, stations, epochs))
    formula = max(models, stations) * epochs + min(models, stations) - 1
    fact = published_figures.Fact(
      'ring2015', 'slots', 0, str(formula), 'slots', 'd', facts['slots'].text
    )
    yield papers_page.Row(
      f'M = {models}, N = {stations}, E = {epochs}: {facts["slots"].text}',
      fact,
      predicted=count,
      by='our schedule',
    )


def _time_rows(facts, result, saved):
  for way, title in _WAYS.items():
    for quantity, name in (('time', 'time'), ('sent', 'MB sent')):
      yield papers_page.Row(
        f"{name} over the ring's: {title}",
        measured=result.get(f'{quantity}_over_ring', way),
        unit='x',
        why_not=result.why_not,
        hardware=result.hardware,
      )
  yield papers_page.Row(
    'time over that of the schedule without delays',
    measured=result.get('time_over_ideal'),
    unit='x',
    why_not=result.why_not,
    hardware=result.hardware,
  )
  by_way = result.get('hours') or {}
  for way, title in _BASELINES.items():
    if way in by_way:
      yield papers_page.Row(
        f'hours saved, {_MEASURED_SET} GB on a disk of {_DISK} MB/s, from the '
        f'measured rates: against {title}'
        + (', which decodes files again' if way == 'parts' else ''),
        facts['hours_saved'],
        predicted=by_way[way] - by_way['ring'],
        by='formula',
        unit='h',
        hardware=result.hardware,
      )
  dozens = [
    f'{size:,} GB over {name}: {hours_by_way["parts"]:.0f} h'
    for (name, size), hours_by_way in saved.items()
    if hours_by_way['parts'] >= _DOZEN
  ]
  yield papers_page.Row(
    'hours saved against migrating data',
    facts['hours_saved'],
    predicted='; '.join(dozens) + '; less over others' if dozens else f'never {_DOZEN} h',
    why_not='not run, because sets of this size are not here',
    hardware=f'{_STATIONS} K80 stations, {_RUN_EPOCHS} epochs (assumption)',
  )
  yield papers_page.Row(
    'each model ends as trained alone',
    facts['result'],
    why_not='not run by this study: tests/runtimes/test_model_ring.py holds the same bits',
  )


def _draw(facts, saved, path):
  """Slots by models; hours saved by the size of the set."""
  with drawing.figure(path, 9.5, 3.8, dpi=110, style=drawn.STYLE) as figure:
    left, right = figure.subplots(1, 2)
    models = list(range(1, 17))
    slots = [len(schedule.slots(m, _STATION_COUNT, _EPOCHS)) for m in models]
    formula = [max(m, _STATION_COUNT) * _EPOCHS + min(m, _STATION_COUNT) - 1 for m in models]
    left.plot(models, slots, 'o', color=drawing.BLUE, label='our schedule')
    left.plot(
      models, formula, '-', color=drawing.INK, linewidth=1, label=f'{facts["slots"].text} (paper)'
    )
    left.plot(
      models,
      [m * _EPOCHS for m in models],
      '--',
      color=drawing.GREY,
      label='M E: every accelerator busy',
    )
    left.set(title=f'Slots, N = {_STATION_COUNT}, E = {_EPOCHS}', xlabel='models M', ylim=(0, None))
    left.legend(fontsize=8)
    for name, colour in zip(_LINKS, drawing.COLOURS):
      for way, line in zip(_BASELINES, ('o-', 's:')):
        points = [saved[name, size][way] for size in _SETS]
        right.plot(_SETS, points, line, color=colour, label=f'{way}, {name}')
    right.axhspan(_DOZEN, 8 * _DOZEN, color=drawing.GREY, alpha=0.15, label='"dozens" (paper)')
    right.set(title='Planned hours that a ring saves', xscale='log', xlabel='GB of the set')
    right.set_xticks(_SETS, [f'{s:,}' for s in _SETS])
    right.set_yscale('symlog', linthresh=10)
    right.set_yticks([-10, 0, 10, 100], ['-10', '0', '10', '100'])
    right.minorticks_off()
    right.legend(fontsize=8)
