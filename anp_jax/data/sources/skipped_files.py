"""Counts of the files that are not read, by suffix or place."""

import collections
import os

from anp_jax import config as config_lib
from anp_jax.data.image_files import images

_MOST_KINDS = 8  # named in a line
_NO_SUFFIX = 'without a suffix'


class SkippedFiles:
  """Counts of files by suffix or place, each kind with its first file."""

  def __init__(self):
    self._counts: collections.Counter[str] = collections.Counter()
    self._first: dict[str, str] = {}

  def __len__(self) -> int:
    return self._counts.total()

  def add(self, path: str, kind: str = '') -> None:
    """Counts a file.

    Args:
      path: name of the file in messages.
      kind: name of its kind in messages; '': its suffix.
    """
    path = config_lib.printable(path)
    kind = kind or os.path.splitext(path)[1].lower() or _NO_SUFFIX
    self._counts[kind] += 1
    self._first.setdefault(kind, path)

  def text(self, hints: dict[str, str]) -> str:
    """A text such as '5 .heic (first a/1.heic), 2 .svg (first a/x.svg)'.

    Args:
      hints: advice about some of the kinds.
    """
    kinds = sorted(self._counts.items(), key=lambda item: (-item[1], item[0]))
    items = []
    for kind, count in kinds[:_MOST_KINDS]:
      hint = f'; {hints[kind]}' if kind in hints else ''
      items.append(f'{count:,} {kind} (first {self._first[kind]}{hint})')
    more = sum(count for _, count in kinds[_MOST_KINDS:])
    if more:
      items.append(f'{more:,} others')
    return ', '.join(items)


def heif_hints() -> dict[str, str]:
  """The hint that HEIC needs a package, where the package is missing."""
  if images.has_heif():
    return {}
  hint = 'pillow-heif reads them (pip install pillow-heif)'
  return dict.fromkeys(images.HEIF_SUFFIXES, hint)
