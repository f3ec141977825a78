"""Many models in a pipeline: Chen et al., ISM 2015."""

import functools

from anp_jax.runtimes.relay import schedule
from anp_jax.system import drawing
from scripts.study.papers import drawn
from scripts.study.papers import lab as lab_lib
from scripts.study.papers import page
from scripts.study.papers import published

# (models, accelerators, epochs)
_CASES = ((2, 4, 10), (4, 4, 10), (16, 4, 10), (4, 2, 3), (64, 16, 90))
_STATION_COUNT, _EPOCHS = 4, 10  # of the figure
# The hours that a ring saves: sets in GB, links in bytes/s, epochs, stations.
_SETS = (10, 50, 150, 500, 1000)
_LINKS = {'1 Gbit/s': 125e6, '10 Gbit/s': 1.25e9}
_RUN_EPOCHS, _STATIONS = 90, 4
_STATE_GB = 0.205  # ResNet-50's weights and momentum in float32
_DOZEN = 12


def hours_saved(
  gigabytes: float, bandwidth: float, epochs: int, stations: int,
  state: float = _STATE_GB,
) -> float:  # fmt: skip
  """Hours that are not spent on sending data, for one accelerator.

  In the baseline an accelerator keeps its model and receives a part of the
  set, |D| / N, in each of the N slots of an epoch; in a ring it receives one
  model's state.

  Args:
    gigabytes: of the set.
    bandwidth: bytes a second that an accelerator receives.
    epochs: of each model.
    stations: accelerators, N.
    state: GB of a model's state.
  """
  received = (gigabytes / stations - state) * 1e9
  return epochs * stations * received / bandwidth / 3600


def section(lab: lab_lib.Lab, facts: published.Facts) -> page.Section:
  """The paper's page."""
  result = _measure(lab)
  rows = [*_slot_rows(facts), *_time_rows(facts, result)]
  table = [('hours saved, by GB of the set', *(f'{s:,}' for s in _SETS))]
  for name, bandwidth in _LINKS.items():
    table.append((name, *(
      f'{hours_saved(s, bandwidth, _RUN_EPOCHS, _STATIONS):.1f}' for s in _SETS
    )))  # fmt: skip
  return page.Section(
    title='ring2015: Training many models in a pipeline (Chen, Lee, Xia, Lin, '
    'Suzumura, Lin; ISM 2015)',
    question='How long do many models take that travel between '
    'accelerators that keep their parts of the data?',
    rows=rows,
    tables=[(
      f'Hours that an accelerator of {_STATIONS} does not wait for data, '
      f'{_RUN_EPOCHS} epochs, {1000 * _STATE_GB:.0f} MB a model, if nothing '
      'hides sending:', table,
    )],
    notes=[
      'M models, N accelerators, E epochs. Slots are those of our schedule, '
      'counted; their formula is the paper\'s.',
      'Hours: arithmetic, E N (|D| / N - state) / bandwidth. The paper gives '
      'neither the set nor the link of its "dozens".',
      'The measured runs: a small ring of this machine, and the same models '
      'in two other ways; sets here are small, so that computing hides what '
      'the baseline sends.',
    ],
    figures=[(
      'ring2015', 'slots by models, and hours saved',
      functools.partial(_draw, facts),
    )],
  )  # fmt: skip


def _measure(lab) -> lab_lib.Measurement:
  """A ring of two processes, and its two rivals."""
  if lab.cores < 2:
    return lab_lib.Measurement(why_not=lab.too_small)
  return lab.measure('ring2015-ring', [
    '-m', 'scripts.study', 'relay', '--config=configs/relay_anp.py',
    '--workdir={folder}', '--stations=2', '--config.duration=1 epochs',
    '--config.schedule.warmup=0 epochs', '--config.data.image_size=24',
    '--config.data.resize=28',
  ])  # fmt: skip


def _slot_rows(facts):
  for models, stations, epochs in _CASES:
    count = len(schedule.slots(models, stations, epochs))
    formula = max(models, stations) * epochs + min(models, stations) - 1
    fact = published.Fact(
      'ring2015', 'slots', 0, str(formula), 'slots', 'd', facts['slots'].text
    )
    yield page.Row(
      f'M = {models}, N = {stations}, E = {epochs}: {facts["slots"].text}',
      fact, predicted=count, by='our schedule',
    )  # fmt: skip


def _time_rows(facts, result):
  for way, title in (
    ('one after another', 'models one after another, batches divided'),
    ('parts travel', 'a model a process, data migrates (the baseline)'),
  ):
    for quantity, name in (('time', 'time'), ('sent', 'MB sent')):
      yield page.Row(
        f'{name} over the ring\'s: {title}',
        measured=result.get(f'{quantity}_over_ring', way), unit='x',
        why_not=result.why_not, hardware=result.hardware,
      )  # fmt: skip
  yield page.Row(
    'time over that of the schedule without delays',
    measured=result.get('time_over_ideal'), unit='x',
    why_not=result.why_not, hardware=result.hardware,
  )  # fmt: skip
  dozens = [
    f'{size:,} GB over {name}'
    for name, bandwidth in _LINKS.items()
    for size in _SETS
    if hours_saved(size, bandwidth, _RUN_EPOCHS, _STATIONS) >= _DOZEN
  ]
  yield page.Row(
    'hours saved against migrating data', facts['hours_saved'],
    predicted=f'{_DOZEN} h or more: {"; ".join(dozens)}', by='arithmetic',
    why_not='not run, because sets of this size are not here',
    hardware=f'{_STATIONS} accelerators, {_RUN_EPOCHS} epochs (assumption)',
  )  # fmt: skip
  yield page.Row(
    'each model ends as trained alone', facts['result'],
    measured='the same bits', hardware='tests/processes',
  )  # fmt: skip


def _draw(facts, path):
  """Slots by models; hours saved by the size of the set."""
  with drawing.figure(path, 9.5, 3.8, dpi=110, style=drawn.STYLE) as figure:
    left, right = figure.subplots(1, 2)
    models = list(range(1, 17))
    slots = [len(schedule.slots(m, _STATION_COUNT, _EPOCHS)) for m in models]
    formula = [
      max(m, _STATION_COUNT) * _EPOCHS + min(m, _STATION_COUNT) - 1
      for m in models
    ]
    left.plot(models, slots, 'o', color=drawing.BLUE, label='our schedule')
    left.plot(models, formula, '-', color=drawing.INK, linewidth=1,
              label=f'{facts["slots"].text} (paper)')  # fmt: skip
    left.plot(models, [m * _EPOCHS for m in models], '--', color=drawing.GREY,
              label='M E: every accelerator busy')  # fmt: skip
    left.set(title=f'Slots, N = {_STATION_COUNT}, E = {_EPOCHS}',
             xlabel='models M', ylim=(0, None))  # fmt: skip
    left.legend(fontsize=8)
    for (name, bandwidth), colour in zip(_LINKS.items(), drawing.COLOURS):
      hours = [hours_saved(s, bandwidth, _RUN_EPOCHS, _STATIONS) for s in _SETS]
      right.plot(_SETS, hours, 'o-', color=colour, label=name)
    right.axhspan(_DOZEN, 8 * _DOZEN, color=drawing.GREY, alpha=0.15,
                  label='"dozens of hours" (paper)')  # fmt: skip
    right.set(title=f'Hours saved, {_RUN_EPOCHS} epochs', xscale='log',
              xlabel='GB of the set', yscale='log')  # fmt: skip
    right.set_xticks(_SETS, [f'{s:,}' for s in _SETS])
    right.set_yticks([1, 10, 100], ['1', '10', '100'])
    right.minorticks_off()
    right.legend(fontsize=8)
