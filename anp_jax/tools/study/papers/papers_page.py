"""A paper's page: a table of the paper's figures and ours, and figures."""

from collections.abc import Callable, Sequence
import dataclasses
import os

from anp_jax.system import files, markdown
from anp_jax.tools.study.papers import published_figures

_HEAD = ('what', 'paper', 'ours measured', 'ours predicted', 'ratio', 'hardware')
_PREAMBLE = (
  "Marks of the papers' figures: (p) read in the paper or its abstract, (c) in "
  "the authors' code, (d) derived from these, (?) not certain. *Ratio* is ours "
  "over the paper's, measured where we measured, else predicted. *Planner* is "
  '`anp_jax.tools.plan`, arithmetic from data sheets and published rates; *emulator* '
  'is `anp_jax.tools.study strategies --emulate`: real processes and messages, a '
  'sleep in place of computing. What was measured stands in the workdir of the '
  'study: the same command in another one measures it again, or, with '
  '`--predict_only`, says that it was not run.'
)
_IMAGES = 'images'


@dataclasses.dataclass(frozen=True)
class Row:
  """One figure of the paper's, and ours.

  Attributes:
    what: that is compared.
    paper: as published; None: no such figure was published.
    measured: by us.
    predicted: by us.
    by: what predicted it, such as 'planner'.
    hardware: of ours.
    why_not: why nothing was measured, 'not run, because ...'.
    unit: of ours; by default the paper's.
  """

  what: str
  paper: published_figures.Fact | None = None
  measured: float | str | None = None
  predicted: float | str | None = None
  by: str = 'planner'
  hardware: str = ''
  why_not: str = ''
  unit: str = ''

  @property
  def ratio(self) -> float | None:
    """Ours over the paper's; None where one of them is no number."""
    base = self.paper.value if self.paper else None
    ours = self.predicted if self.measured is None else self.measured
    if not base or not isinstance(ours, int | float):
      return None
    return ours / base

  def cells(self) -> tuple[str, ...]:
    """The texts of the table's columns."""
    unit = self.unit or (self.paper.unit if self.paper else '')
    measured = _number(self.measured, unit) or self.why_not or '-'
    predicted = _number(self.predicted, unit)
    if predicted and self.by:
      predicted += f' ({self.by})'
    ratio = '-'
    if self.ratio is not None:
      kind = 'predicted' if self.measured is None else 'measured'
      ratio = f'{self.ratio:.2f} ({kind})'
    return (
      self.what,
      str(self.paper) if self.paper else '-',
      measured,
      predicted or '-',
      ratio,
      self.hardware or '-',
    )


@dataclasses.dataclass(frozen=True)
class Section:
  """A paper's page.

  Attributes:
    title: of the paper.
    question: that its experiment answers.
    rows: of the table.
    tables: further ones: a caption, and rows of texts, the first the head.
    notes: what limits the comparison.
    figures: a name, a caption, and a function that draws to a path.
  """

  title: str
  question: str
  rows: Sequence[Row]
  tables: Sequence[tuple[str, Sequence[Sequence[str]]]] = ()
  notes: Sequence[str] = ()
  figures: Sequence[tuple[str, str, Callable[[str], None]]] = ()


def write(
  path: str, title: str, command: str, sections: Sequence[tuple[Section, Sequence[str]]]
) -> None:
  """Writes the page, and its figures to the folder images next to it.

  Args:
    path: of the page, a Markdown file.
    title: of the page.
    command: that made it.
    sections: each with the commands that it is made of.
  """
  images = os.path.join(os.path.dirname(path), _IMAGES)
  os.makedirs(images, exist_ok=True)
  parts = [f'# {title}', f'    {command}', _PREAMBLE]
  for section, commands in sections:
    parts += [f'## {section.title}', section.question]
    parts.append(markdown.table([_HEAD, *(r.cells() for r in section.rows)]))
    for name, caption, draw in section.figures:
      file = f'papers_{name}.png'
      draw(os.path.join(images, file))
      parts.append(f'![{caption}]({_IMAGES}/{file})')
    for caption, rows in section.tables:
      parts += [caption, markdown.table(rows, 'lr')]
    if section.notes:
      parts.append('\n'.join(f'- {note}' for note in section.notes))
    if commands:
      parts += ['Made of:', '\n'.join(f'    {line}' for line in commands)]
  files.write_atomic(path, '\n\n'.join(parts) + '\n')


def plain(section: Section) -> str:
  """The section's table for a terminal."""
  rows = [_HEAD[:-1], *(row.cells()[:-1] for row in section.rows)]
  return f'{section.title}\n\n{markdown.plain(rows)}'


def _number(value, unit) -> str:
  """A value with its unit; '' of None."""
  if value is None:
    return ''
  if isinstance(value, str):
    return value
  text = f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3g}'
  space = ' ' if len(unit) > 1 or unit in ('h', 'M') else ''
  return f'{text}{space}{unit}'
