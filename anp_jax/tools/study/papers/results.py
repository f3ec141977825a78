"""Our numbers for a paper, from results or recorded."""

from collections.abc import Mapping
import dataclasses

from anp_jax.reporting import report_kit
from anp_jax.tools.study.papers import lab as lab_lib, papers_page, published


def section(name: str, lab: lab_lib.Lab) -> papers_page.Section:
  """Returns a paper's part of the page."""
  paper = published.read(name)
  numbers = Numbers(paper, lab)
  return papers_page.Section(
    name,
    paper,
    [numbers.row(row) for row in paper.rows],
    [numbers.table(table) for table in paper.tables],
    [{curve: numbers.curve(curve) for curve in panel.curves} for panel in paper.panels],
    [lab.typed(key, command) for key, command in paper.commands.items()],
  )


class Numbers:
  """The numbers of one paper's curves."""

  def __init__(self, paper: published.Paper, lab: lab_lib.Lab):
    self._paper = paper
    self._lab = lab

  def at(self, name: str, size: int | str = '') -> tuple[float | None, str]:
    """Returns a curve's number at a size, None if there is none, and its hardware."""
    curve = self._paper.curves[name]
    text = str(size * curve.x_factor) if size else ''
    result = self._result(curve.command, text)
    value = _pick(result, curve.path, text)
    if value is None:
      return curve.recorded.get(str(size)), curve.hardware
    if curve.over:
      base = _pick(self._result(curve.over_command or curve.command, text), curve.over, text)
      value = value / base if base else None
    return value, result.hardware

  def curve(self, name: str) -> dict[int, float]:
    """Returns a curve's numbers, by size."""
    points = {size: self.at(name, size)[0] for size in self._paper.curves[name].each}
    return {size: value for size, value in points.items() if value is not None}

  def row(self, comparison: published.Comparison) -> published.Comparison:
    """Returns a row of the page, with our numbers."""
    measured, where = self._value(comparison.measured)
    predicted, based_on = self._value(comparison.predicted)
    reason = ''
    if measured is None and comparison.measured is not None:
      reason = 'its command gave no such number'
      if self._lab.predict_only:
        reason = 'not run, because of --predict_only'
    return dataclasses.replace(
      comparison,
      measured=measured,
      predicted=predicted,
      hardware=comparison.hardware or where or based_on,
      why_not=comparison.why_not or reason,
    )

  def table(self, table: published.Table) -> report_kit.Table:
    """Returns a further table of the page."""
    rows = [tuple(table.head), *map(tuple, table.rows)]
    for name in table.curves:
      points = self.curve(name)
      sizes = self._paper.curves[table.curves[0]].each
      rows.append((name, *(f'{points[s]:.2f}' if s in points else '-' for s in sizes)))
    return report_kit.Table(rows, caption=table.caption)

  def _value(self, value):
    """A comparison's number or text, and the hardware if it comes from a curve."""
    if not isinstance(value, Mapping):
      return value, ''
    number, hardware = self.at(value['curve'], value.get('at', ''))
    if number is None:
      return None, ''
    if 'part_of' in value:
      number = value['part_of'] / number
    return number * value.get('times', 1), hardware

  def _result(self, name, size):
    if not name:
      return None
    command = self._paper.commands[name]
    label = f'{name}-{size}' if '{x}' in command else name
    return self._lab.result(label, command.replace('{x}', size))


def _pick(result, path, size) -> float | None:
  """The number at a path of a result; None if there is none."""
  value = result and result.values
  for step in path:
    if value is None:
      return None
    if isinstance(step, Mapping):
      conditions = {key: text.replace('{x}', size) for key, text in step.items()}
      matches = (item for item in value if all(str(item[k]) == v for k, v in conditions.items()))
      value = next(matches, None)
    else:
      value = value.get(step.replace('{x}', size))
  return None if value in (None, '') else float(value)
