"""Reports: texts, tables and figures in order, as Markdown, HTML or for a terminal."""

import base64
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import os
from typing import Any

from anp_jax.system import files, markdown


@dataclasses.dataclass(frozen=True)
class Table:
  """A table.

  Attributes:
    rows: rows of texts, the first one the header; a header of empty texts is shown
      in Markdown alone, which has no table without one.
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
    return _captioned(self.caption, markdown.plain(self.rows[not any(self.rows[0]) :], self.align))


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


def facts(rows: Sequence[tuple[str, str]]) -> Table | None:
  """Returns a table of (name, text) rows without a header; None for no rows."""
  return Table([('', ''), *rows], 'l') if rows else None


def text(title: str, blocks: Iterable[Block | None]) -> str:
  """Returns a page in Markdown: its title, then the blocks that are not empty."""
  parts = [block if isinstance(block, str) else block.markdown() for block in blocks if block]
  return '\n\n'.join([f'# {title}', *parts]) + '\n'


def write(path: str, title: str, blocks: Iterable[Block | None]) -> None:
  """Writes a page; see `text`."""
  files.write_atomic(path, text(title, blocks))


def plain(blocks: Iterable[str | Table | None]) -> str:
  """Returns the blocks that are not empty for a terminal, a blank line between them."""
  parts = (block.plain() if isinstance(block, Table) else block for block in blocks)
  return '\n\n'.join(filter(None, parts))


def html(folder: str, title: str, sections: Mapping[str, Any], **values: Any) -> str:
  """Returns a page as one HTML file that opens anywhere: no script, no network.

  Args:
    folder: folder of the page's template, index.html.j2, which extends base.html.j2.
      All texts are escaped.
    title: title of the page.
    sections: content by title, for the template under the title in lower case; an
      empty one is not in the list of sections.
    **values: further values for the template.
  """
  import jinja2  # 0.1 s, at the end of a run

  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader([folder, os.path.dirname(__file__)]),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
    finalize=_encodable,
  )
  titles = [name for name, content in sections.items() if content]
  contents = {name.lower(): content for name, content in sections.items()}
  page = environment.get_template('index.html.j2')
  return page.render(name=title, titles=titles, **contents, **values)


def data_uri(data: bytes, kind: str) -> str:
  """Returns an image as a URI that holds its bytes; kind is png, jpeg ..."""
  return f'data:image/{kind};base64,{base64.b64encode(data).decode()}'


def code(lines: Iterable[str]) -> str:
  """Returns commands or other lines as they are typed."""
  return '\n'.join(f'    {line}' for line in lines)


def bullets(notes: Iterable[str]) -> str:
  """Returns notes, which are Markdown, as a list."""
  return '\n'.join(f'- {note}' for note in notes)


def _captioned(caption, table):
  return f'{caption}\n\n{table}' if caption else table


def _encodable(value):
  """A text without the halves of characters that a file's name may hold."""
  if type(value) is str:  # and not what is escaped already
    return value.encode('utf-8', 'replace').decode()
  return value
