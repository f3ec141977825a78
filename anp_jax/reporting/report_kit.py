"""Reports: texts, tables and figures in order, as Markdown or for a terminal."""

from collections.abc import Iterable, Sequence
import dataclasses

from anp_jax.system import files, markdown


@dataclasses.dataclass(frozen=True)
class Table:
  """A table.

  Attributes:
    rows: rows of texts, the first one the header.
    align: one letter per column, see `markdown.table`.
    caption: line above the table.
  """

  rows: Sequence[Sequence[str]]
  align: str = 'lr'
  caption: str = ''

  def markdown(self) -> str:
    """Returns the table on a page."""
    return _captioned(self.caption, markdown.table(self.rows, self.align))

  def plain(self) -> str:
    """Returns the table in a terminal."""
    return _captioned(self.caption, markdown.plain(self.rows, self.align))


@dataclasses.dataclass(frozen=True)
class Figure:
  """A figure.

  Attributes:
    caption: subject of the figure.
    file: path of the figure, relative to the page.
  """

  caption: str
  file: str

  def markdown(self) -> str:
    """Returns the figure on a page."""
    return f'![{self.caption}]({self.file})'


Block = str | Table | Figure


def text(title: str, blocks: Iterable[Block]) -> str:
  """Returns a page in Markdown: its title, then the blocks that are not empty."""
  parts = [block if isinstance(block, str) else block.markdown() for block in blocks]
  return '\n\n'.join([f'# {title}', *filter(None, parts)]) + '\n'


def write(path: str, title: str, blocks: Iterable[Block]) -> None:
  """Writes a page; see `text`."""
  files.write_atomic(path, text(title, blocks))


def plain(blocks: Iterable[str | Table]) -> str:
  """Returns blocks for a terminal, with a blank line between them."""
  parts = [block if isinstance(block, str) else block.plain() for block in blocks]
  return '\n\n'.join(filter(None, parts))


def code(lines: Iterable[str]) -> str:
  """Returns commands or other lines as they are typed."""
  return '\n'.join(f'    {line}' for line in lines)


def bullets(notes: Iterable[str]) -> str:
  """Returns notes as a list; a star in them is no markup."""
  return '\n'.join(f'- {note}'.replace('*', '\\*') for note in notes)


def _captioned(caption, table):
  return f'{caption}\n\n{table}' if caption else table
