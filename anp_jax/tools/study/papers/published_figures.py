"""What the papers published: the figures of published.csv.

Marks: (p) read in the paper or its abstract, (c) read in the authors' code, (d)
derived from these, (?) not certain.
"""

from collections.abc import Sequence
import csv
import dataclasses
import os

FILE = os.path.join(os.path.dirname(__file__), 'published.csv')


@dataclasses.dataclass(frozen=True)
class Fact:
  """One published figure.

  Attributes:
    paper: a name such as 'anp2017'.
    quantity: what it is, such as 'speed_up'.
    size: nodes, threads or devices; 0: of none in particular.
    text: the figure as published.
    unit: 'x' for a ratio, '%', 'h', ...; '' for none.
    mark: 'p', 'c', 'd' or '?'.
    statement: where it is from, and what it says.
  """

  paper: str
  quantity: str
  size: int
  text: str
  unit: str
  mark: str
  statement: str

  @property
  def value(self) -> float | None:
    """The figure; None of a statement in words."""
    try:
      return float(self.text)
    except ValueError:
      return None

  def __str__(self) -> str:
    text = self.text
    if self.value is not None and self.value >= 10_000:
      text = f'{self.value:,.0f}'
    space = ' ' if len(self.unit) > 1 or self.unit in ('h', 'M') else ''
    return f'{text}{space}{self.unit} ({self.mark})'


class Facts:
  """The figures of one paper."""

  def __init__(self, facts: Sequence[Fact]):
    self._facts = {(f.quantity, f.size): f for f in facts}

  def __getitem__(self, key: str | tuple[str, int]) -> Fact:
    """The figure of a quantity, or of (quantity, size)."""
    return self._facts[key if isinstance(key, tuple) else (key, 0)]

  def items(self):
    """Pairs of (quantity, size) and its figure."""
    return self._facts.items()

  def by_size(self, quantity: str) -> dict[int, float]:
    """The values of a quantity, by size."""
    return {size: fact.value for (name, size), fact in self._facts.items() if name == quantity}

  def quantities(self) -> dict[str, Fact]:
    """One figure of each quantity, by its name."""
    return {name: fact for (name, _), fact in self._facts.items()}


def read() -> dict[str, Facts]:
  """The figures of all papers, by paper."""
  by_paper = {}
  with open(FILE, newline='', encoding='utf-8') as f:
    for row in csv.DictReader(f):
      fact = Fact(
        row['paper'],
        row['quantity'],
        int(row['size'] or 0),
        row['value'],
        row['unit'],
        row['mark'],
        row['statement'],
      )
      by_paper.setdefault(fact.paper, []).append(fact)
  return {paper: Facts(facts) for paper, facts in by_paper.items()}
