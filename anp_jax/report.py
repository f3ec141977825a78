"""The page of a run: curves, scores, speed, config, from metrics.jsonl."""

import math
import os
import statistics

from anp_jax import telemetry

# Okabe and Ito's colours, told apart with any kind of colour vision.
_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = (
  '#0072b2', '#d55e00', '#009e73', '#cc79a7', '#8c8c8c',
)  # fmt: skip
_SCORES = (
  ('anp_top5', _ORANGE, 's'), ('noun_top1', _PURPLE, 'D'),
  ('adjective_top1', _GREEN, '^'), ('anp_top1', _BLUE, 'o'),
)  # fmt: skip

# A curve with more points than the figure has room for hides its own course,
# and so do markers that touch.
_POINTS, _MARKERS = 400, 30


def write(workdir: str, config_text: str, summary: dict) -> str:
  """Writes workdir/report/: curves.png and report.md.

  Args:
    workdir: the folder of the run, with metrics.jsonl.
    config_text: the resolved config, shown as it is.
    summary: what else is to be said, name to value, in this order.

  Returns:
    The scores and the speed as plain aligned text for the terminal.
  """
  train, validation = _load(workdir)
  scores = _scores(train, validation)
  facts = _facts(train, validation) + [
    (str(name).replace('_', ' '), _fact(value))
    for name, value in summary.items()
  ]
  folder = os.path.join(workdir, 'report')
  os.makedirs(folder, exist_ok=True)
  _plot(os.path.join(folder, 'curves.png'), train, validation)
  name = os.path.basename(os.path.abspath(workdir))
  with open(os.path.join(folder, 'report.md'), 'w', encoding='utf-8') as f:
    f.write(_page(name, scores, facts, config_text))
  tables = [_text(rows) for rows in (scores, facts) if rows]
  return '\n\n'.join(tables or ['nothing was recorded']) + '\n'


def exists(workdir: str) -> bool:
  """Whether the run's page was written."""
  return os.path.exists(os.path.join(workdir, 'report', 'report.md'))


def _load(workdir):
  """The lines of training and of validation, each step once, in order."""
  found = {'train': {}, 'validation': {}}
  for record in telemetry.read(workdir):
    # The last line counts: a resumed run may evaluate its first step again.
    found.setdefault(record['kind'], {})[record['step']] = record
  return tuple(
    [steps[s] for s in sorted(steps)]
    for steps in (found['train'], found['validation'])
  )


def _scores(train, validation):
  """Rows of the table of scores, the first one its head; [] if none."""
  have = set().union(*train[-1:], *validation)
  rows = []
  for name, label in telemetry.LABELS.items():
    if name not in have:
      continue
    best = _best(name, validation)
    row = [label, _value(name, best), _where(best)]
    row += [_value(name, _last(name, lines)) for lines in (validation, train)]
    rows.append(row)
  head = ['', 'best validation', 'at', 'last validation', 'last training']
  if not validation:
    return [[r[0], r[-1]] for r in [head, *rows]] if rows else []
  return [head, *rows]


def _best(name, lines):
  """The first line with the best finite value; {} if there is none."""
  lines = [r for r in lines if math.isfinite(r.get(name, math.nan))]
  sign = 1 if name == 'loss' else -1
  return min(lines, key=lambda r: sign * r[name], default={})


def _last(name, lines):
  return next((r for r in reversed(lines) if name in r), {})


def _value(name, line):
  return telemetry.score(name, line[name]) if line else '-'


def _where(line):
  return f'epoch {line["epoch"]:.4g}, step {line["step"]}' if line else '-'


def _facts(train, validation):
  """Speed and time as (name, text) rows."""
  if not train:
    return []
  ends = train[-1:] + validation[-1:]
  rows = [('trained', _where(max(ends, key=lambda r: r['step'])))]
  seconds = sum(r.get('seconds', 0) for r in train)
  rows.append(('training time', f'{telemetry.elapsed(seconds)} without pauses'))
  # The median: the first interval may hold a compilation.
  for name, label, form in (
    ('images_per_second', 'images/s (median)', '{:.0f}'),
    ('input_wait', 'input wait (median)', '{:.1%}'),
    ('mfu', 'MFU (median)', '{:.1%}'),
  ):
    values = [r[name] for r in train if name in r]
    if values:
      rows.append((label, form.format(statistics.median(values))))
  return rows


def _fact(value):
  return f'{value:.6g}' if isinstance(value, float) else str(value)


def _text(rows):
  """Rows as aligned columns, to the right below a head (first cell empty)."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  right = not rows[0][0]
  lines = []
  for row in rows:
    cells = [row[0].ljust(widths[0])]
    for cell, width in zip(row[1:], widths[1:]):
      cells.append(cell.rjust(width) if right else cell.ljust(width))
    lines.append('  '.join(cells).rstrip())
  return '\n'.join(lines)


def _page(name, scores, facts, config_text):
  """The text of report.md."""
  fence = '```'
  parts = [f'# {name}']
  if scores:
    parts.append(_markdown(scores))
  if facts:
    parts.append(_markdown([('run', ''), *facts]))
  parts += [
    '![Loss, accuracy, learning rate and images/s over the epochs](curves.png)',
    '## Config',
    f'{fence}\n{config_text.rstrip()}\n{fence}',
  ]
  return '\n\n'.join(parts) + '\n'


def _markdown(rows):
  """Rows as a Markdown table, aligned like `_text`."""
  lines = [[cell.replace('|', '\\|') for cell in row] for row in rows]
  side = '---' if rows[0][0] else '---:'
  lines.insert(1, ['---'] + [side] * (len(rows[0]) - 1))
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def _plot(path, train, validation):
  """Draws the four panels."""
  # Here, because loading it takes longer than a mistyped flag should.
  import matplotlib
  import matplotlib.figure

  style = {
    'font.size': 10,
    'axes.titlesize': 11,
    'axes.titlelocation': 'left',
    'axes.titleweight': 'bold',
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.edgecolor': '#555555',
    'axes.grid': True,
    'axes.grid.axis': 'y',
    'axes.axisbelow': True,
    'grid.color': '#e4e4e4',
    'legend.frameon': False,
    'legend.fontsize': 9,
    'lines.linewidth': 1.8,
    'lines.markersize': 5,
    'axes.xmargin': 0.02,
    'axes.ymargin': 0.08,
  }
  with matplotlib.rc_context(style):
    # Without pyplot: no window system, no state left behind.
    figure = matplotlib.figure.Figure(figsize=(11, 7), layout='constrained')
    axes = figure.subplots(2, 2, sharex=True)
    _plot_loss(axes[0, 0], train, validation)
    _plot_accuracy(axes[0, 1], train, validation)
    axes[1, 0].set_title('Learning rate')
    _line(axes[1, 0], 'learning_rate', train, color=_BLUE)
    axes[1, 1].set_title('Images/s')
    _line(axes[1, 1], 'images_per_second', train, color=_BLUE)
    for axis in axes[1]:
      axis.set_xlabel('epoch')
    axes[0, 0].set_xlim(left=0)  # the axes share it
    for axis in axes.flat[1:]:
      axis.set_ylim(0, 1.04 * axis.get_ylim()[1])
    for axis in axes[0]:
      if axis.lines:
        axis.legend()
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    figure.savefig(path, dpi=130, metadata={'Software': None})


def _plot_loss(axis, train, validation):
  axis.set_title('Loss')
  _line(axis, 'loss', train, color=_GREY, label='training')
  _line(axis, 'loss', validation, 'o', color=_BLUE, label='validation')


def _plot_accuracy(axis, train, validation):
  """Validation scores; training's where there was no evaluation."""
  axis.set_title('Accuracy, ' + ('validation' if validation else 'training'))
  axis.yaxis.set_major_formatter(lambda x, _: f'{100 * x:.3g}%')
  for name, color, marker in _SCORES:
    label = telemetry.LABELS[name]
    if validation:
      _line(axis, name, validation, marker, color=color, label=label)
    else:
      _line(axis, name, train, color=color, label=label)
  if validation:
    _line(
      axis, 'anp_top1', train, color=_GREY, linewidth=1, zorder=1,
      label='ANP top-1, training',
    )  # fmt: skip


def _line(axis, name, lines, marker='', **style):
  """Draws one metric; with a marker each value, else a thinned curve."""
  epochs, values = _curve(name, lines, None if marker else _POINTS)
  if epochs:
    every = math.ceil(len(epochs) / _MARKERS)
    axis.plot(epochs, values, marker=marker, markevery=every, **style)


def _curve(name, lines, points=None):
  """(epochs, values), thinned to the means of at most `points` stretches."""
  lines = [r for r in lines if name in r]
  size = math.ceil(len(lines) / points) if points and lines else 1
  parts = [lines[i : i + size] for i in range(0, len(lines), size)]
  return tuple(
    [statistics.fmean(r[key] for r in part) for part in parts]
    for key in ('epoch', name)
  )
