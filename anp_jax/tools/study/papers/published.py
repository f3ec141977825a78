"""The figures that the papers published, and the sources of ours: the TOML files here.

Each paper's file has the published figures, the commands that predict or
measure ours, `curves` that say which numbers of a command's result are compared,
and the rows, tables and panels of the page. A comment says where a figure is from.

Marks: (p) read in the paper or its abstract, (c) read in the authors' code, (d)
derived from these, (?) not certain.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
import tomllib

PAPERS = ('anp2017', 'anp553', 'uneven2017', 'invariant2016', 'ring2015', 'others')
_FOLDER = pathlib.Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Fact:
  """One published figure.

  Attributes:
    quantity: its name, such as 'speed_up'.
    value: the figure as published.
    mark: 'p', 'c', 'd' or '?'.
    size: nodes, threads or devices; 0: any.
    unit: 'x' for a ratio, '%', 'h', ...; '' for none.
  """

  quantity: str
  value: str
  mark: str
  size: int = 0
  unit: str = ''

  @property
  def number(self) -> float | None:
    """The figure; None for a statement in words."""
    try:
      return float(self.value)
    except ValueError:
      return None

  def __str__(self) -> str:
    text = self.value
    if self.number is not None and self.number >= 10_000:
      text = f'{self.number:,.0f}'
    return f'{_with_unit(text, self.unit)} ({self.mark})'


@dataclasses.dataclass(frozen=True)
class Curve:
  """Our numbers by size.

  Attributes:
    command: name of the command that measures them; '': they are only recorded.
    path: keys of its result; a table chooses the first item that has its
      values. '{x}', here and in the command, is replaced by the size.
    over: path of the divisor; (): none.
    over_command: name of the command that measures the divisor, by default `command`.
    x_factor: factor from a size to '{x}'.
    each: sizes of the curve in a table or a figure.
    recorded: numbers of an earlier measurement, used where there is no newer one.
    hardware: hardware of the recorded numbers.
  """

  command: str = ''
  path: Sequence[str | Mapping[str, str]] = ()
  over: Sequence[str | Mapping[str, str]] = ()
  over_command: str = ''
  x_factor: int = 1
  each: Sequence[int] = ()
  recorded: Mapping[str, float] = dataclasses.field(default_factory=dict)
  hardware: str = ''


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A row of a paper's table.

  Attributes:
    what: the quantity that is compared.
    paper: published figure, in the file 'quantity' or 'quantity.size', after 'NAME/'
      if it stands in the file of another paper; None: none was published.
    measured: ours: a number, a text, or {curve, at, times, part_of}: a curve's
      number at a size, times a factor, or as a divisor of `part_of`.
    predicted: ours, written in the same way.
    by: what predicted it.
    hardware: on which ours is based, by default the curve's.
    why_not: reason why nothing was measured, 'not run, because ...'.
    unit: unit of ours, by default the paper's.
  """

  what: str
  paper: Fact | None = None
  measured: float | str | Mapping | None = None
  predicted: float | str | Mapping | None = None
  by: str = 'planner'
  hardware: str = ''
  why_not: str = ''
  unit: str = ''

  @property
  def ratio(self) -> float | None:
    """Our figure over the paper's; None where one of them is no number."""
    base = self.paper.number if self.paper else None
    ours = self.predicted if self.measured is None else self.measured
    return ours / base if base and isinstance(ours, int | float) else None

  def cells(self) -> tuple[str, ...]:
    """Returns the texts of the table's columns."""
    unit = self.unit or (self.paper.unit if self.paper else '')
    measured, predicted = (_number(value, unit) for value in (self.measured, self.predicted))
    if predicted and self.by:
      predicted += f' ({self.by})'
    ratio = ''
    if self.ratio is not None:
      kind = 'predicted' if self.measured is None else 'measured'
      ratio = f'{self.ratio:.2f} ({kind})'
    paper = str(self.paper or '')
    cells = self.what, paper, measured or self.why_not, predicted, ratio, self.hardware
    return tuple(cell or '-' for cell in cells)


@dataclasses.dataclass(frozen=True)
class Table:
  """A further table of a paper.

  Attributes:
    caption: line above it.
    head: texts of its head.
    rows: rows of texts.
    curves: names of the curves that are rows, at `each` size of the first.
  """

  caption: str
  head: Sequence[str]
  rows: Sequence[Sequence[str]] = ()
  curves: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Panel:
  """Speed-ups by size.

  Attributes:
    title: title of the panel.
    label: label of its x axis.
    published: published quantities in it.
    curves: names of our curves in it.
  """

  title: str
  label: str
  published: Sequence[str]
  curves: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Paper:
  """One paper, or several that ask one question.

  Attributes:
    title: name and citation.
    question: what its experiment answers.
    facts: published figures, by quantity and size.
    commands: commands by name; '{folder}' stands for a folder of the command's own.
    curves: our numbers, by name.
    rows: the comparison.
    tables: further tables.
    panels: panels of its figure.
    notes: what limits the comparison.
  """

  title: str
  question: str
  facts: Mapping[tuple[str, int], Fact]
  commands: Mapping[str, str]
  curves: Mapping[str, Curve]
  rows: Sequence[Comparison]
  tables: Sequence[Table]
  panels: Sequence[Panel]
  notes: Sequence[str]

  def by_size(self, quantity: str) -> dict[int, float]:
    """Returns the numbers of a published quantity, by size."""
    facts = {size: fact for (name, size), fact in self.facts.items() if name == quantity}
    return {size: fact.number for size, fact in facts.items() if fact.number is not None}


def read(name: str) -> Paper:
  """Reads the file of a paper, one of PAPERS."""
  values = tomllib.loads((_FOLDER / f'{name}.toml').read_text(encoding='utf-8'))
  figures = [Fact(**fact) for fact in values['published']]
  facts = {(fact.quantity, fact.size): fact for fact in figures}
  rows = [row | {'paper': _fact(facts, row.get('paper', ''))} for row in values['rows']]
  return Paper(
    values['title'],
    values['question'],
    facts,
    values.get('commands', {}),
    {name: Curve(**curve) for name, curve in values.get('curves', {}).items()},
    [Comparison(**row) for row in rows],
    [Table(**table) for table in values.get('tables', ())],
    [Panel(**panel) for panel in values.get('panels', ())],
    values['notes'],
  )


def _fact(facts, name) -> Fact | None:
  """The published figure of '[PAPER/]quantity[.size]'; None of ''."""
  paper, _, place = name.rpartition('/')
  quantity, _, size = place.partition('.')
  facts = read(paper).facts if paper else facts
  return facts[quantity, int(size or 0)] if name else None


def _number(value, unit) -> str:
  """A value with its unit; '' of None."""
  if value is None or isinstance(value, str):
    return value or ''
  text = f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3g}'
  return _with_unit(text, unit)


def _with_unit(text, unit) -> str:
  """A number's text and its unit, after a space if the unit is a word."""
  space = ' ' if len(unit) > 1 or unit in ('h', 'M') else ''
  return f'{text}{space}{unit}'
