"""A paper's page: a table of the paper's figures and ours, and figures."""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import os

from anp_jax.reporting import report_kit
from anp_jax.system import drawing
from anp_jax.tools.study.papers import published

_HEAD = ('what', 'paper', 'ours measured', 'ours predicted', 'ratio', 'hardware')
_PREAMBLE = (
  "Marks of the papers' figures: (p) read in the paper or its abstract, (c) in "
  "the authors' code, (d) derived from these, (?) not certain. *Ratio* is ours "
  "over the paper's, measured where we measured, else predicted. *Planner* is "
  '`anp_jax.tools.plan`, arithmetic from data sheets and published rates; *emulator* '
  'is `anp_jax.tools.study strategies --emulate`: real processes and messages, a '
  'sleep in place of computing. `{x}` in a command stands for a size. Without '
  '`--predict_only` the commands that measure are run again where their results '
  'are not in the workdir; otherwise the page shows what was recorded. No command of '
  '`main.py` is run: the page shows the scores of the runs that you train with it.'
)
_IMAGES = 'images'


@dataclasses.dataclass(frozen=True)
class Section:
  """A paper's page.

  Attributes:
    name: name of the paper.
    paper: what it published.
    rows: the comparison, with our numbers.
    tables: further tables.
    curves: our curves by panel and name.
    commands: commands that the page is made of.
  """

  name: str
  paper: published.Paper
  rows: Sequence[published.Comparison]
  tables: Sequence[report_kit.Table]
  curves: Sequence[Mapping[str, Mapping[int, float]]]
  commands: Sequence[str]


def write(path: str, title: str, command: str, sections: Sequence[Section]) -> None:
  """Writes the page, and its figures to the folder images next to it.

  Args:
    path: the page, a Markdown file.
    title: title of the page.
    command: command that made it.
    sections: the papers.
  """
  images = os.path.join(os.path.dirname(path), _IMAGES)
  os.makedirs(images, exist_ok=True)
  blocks: list[report_kit.Block] = [report_kit.code([command]), _PREAMBLE]
  for section in sections:
    blocks += [f'## {section.name}: {section.paper.title}', section.paper.question]
    blocks.append(report_kit.Table([_HEAD, *(r.cells() for r in section.rows)], 'l'))
    if section.curves:
      file = f'papers_{section.name}.png'
      _draw(section, os.path.join(images, file))
      blocks.append(report_kit.Figure('speed-ups', f'{_IMAGES}/{file}'))
    blocks += section.tables
    blocks.append(report_kit.bullets(section.paper.notes))
    blocks += ['Commands:', report_kit.code(section.commands)]
  report_kit.write(path, title, blocks)


def plain(section: Section) -> str:
  """Returns the section's table for a terminal."""
  table = report_kit.Table([_HEAD[:-1], *(row.cells()[:-1] for row in section.rows)], 'l')
  return report_kit.plain([f'{section.name}: {section.paper.title}', table])


def _draw(section, path):
  """Draws the paper's panels next to each other."""
  panels = section.paper.panels
  with drawing.figure(path, 5.5 * len(panels), 4.2, 110, {'axes.grid.axis': 'both'}) as figure:
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel, curves in zip(axes, panels, section.curves):
      _speed_ups(axis, section.paper, panel, curves)


def _speed_ups(axis, paper, panel, curves):
  """Draws speed-ups by size, with the ideal line."""
  points = {}
  for quantity in panel.published:
    points |= paper.by_size(quantity)
  sizes = {1, *points, *itertools.chain(*curves.values())}
  drawing.ideal(axis, sizes)
  hollow = {'markerfacecolor': 'none'}
  for name, look in drawing.looks(curves).items():
    curve = curves[name]
    axis.plot(list(curve), list(curve.values()), label=name, markersize=4, **look, **hollow)
  style = {'markersize': 7, 'color': drawing.INK, **hollow}
  axis.plot(list(points), list(points.values()), 'D', label='published', **style)
  axis.set(title=panel.title, xlabel=panel.label, ylim=(0, None))
  drawing.label_sizes(axis, sizes)
  axis.legend(fontsize=7)
