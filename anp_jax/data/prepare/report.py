"""The report of a preparation: tables for people, lines for programs."""

from collections.abc import Iterable
import json
import os

import numpy as np

from anp_jax.data.prepare import actions as actions_lib
from anp_jax.system import files as files_lib, markdown

MARKDOWN, LINES = 'report.md', 'damaged.jsonl'

_FIRST = 3  # files named for each kind


def write(folder: str, name: str, splits: list[actions_lib.Split], policy: dict) -> None:
  """Writes report.md and damaged.jsonl, the same for the same data.

  Args:
    folder: folder of both files.
    name: name of the set.
    splits: splits after `actions.decide`.
    policy: action on each kind.
  """
  page = '\n'.join(_markdown(name, splits, policy)) + '\n'
  files_lib.write_atomic(os.path.join(folder, MARKDOWN), page)
  with open(os.path.join(folder, LINES), 'w', encoding='utf-8') as file:
    for split in splits:
      for i in _of_kinds(split, actions_lib.KINDS):
        file.write(json.dumps(_line(split, i)) + '\n')


def summary(splits: list[actions_lib.Split], policy: dict) -> list[str]:
  """Returns the lines that a preparation ends with."""
  rows = [(kind, *numbers, meaning) for kind, meaning, *numbers in _kind_rows(splits, policy)]
  kinds = markdown.plain(rows, 'lrrl') if len(rows) > 1 else 'no file is damaged or unusual'
  table = markdown.plain(_split_rows(splits), 'lr')
  notes = [*_reduced(splits), *_left_out(splits)]
  return [splits[0].listing.vocabulary.text(), table, '', kinds, *notes]


def first(splits: list[actions_lib.Split], kinds: Iterable[str]) -> str:
  """Returns the path and kind of the first file of any of the kinds."""
  split, i = next((split, i) for split in splits for i in _of_kinds(split, kinds))
  kind = next(kind for kind in kinds if split.kinds[kind][i])
  reason = split.findings[i].reason
  return f'{split.listing.paths()[i]} ({kind}{f": {reason}" if reason else ""})'


def _of_kinds(split, kinds):
  """Indices of the files of any of the kinds."""
  return np.flatnonzero(np.any([split.kinds[kind] for kind in kinds], 0)).tolist()


def _left_out(splits):
  """Lines about files that were not examined; one where splits share them."""
  return [*dict.fromkeys(filter(None, (s.listing.left_out for s in splits)))]


def _reduced(splits):
  """A line about each split's files that are stored smaller than they are."""
  return [
    f'{split.name}: {split.counts()["reduced"]:,} images reduced to {split.shorter_side} pixels '
    'on their shorter side'
    for split in splits
    if split.shorter_side
  ]


def _split_rows(splits):
  """The rows of a table of splits, the head first."""
  rows = [('split', 'files', 'images', 'converted', 'smallest class')]
  names = splits[0].listing.vocabulary.names
  for split in splits:
    counts = split.counts()
    numbers = [f'{counts[key]:,}' for key in ('listed', 'stored', 'converted')]
    sizes = np.bincount(split.listing.labels[split.stored], minlength=len(names))
    smallest = int(sizes.argmin())
    rows.append((split.name, *numbers, f'{sizes[smallest]:,} ({names[smallest]})'))
  return rows


def _kind_rows(splits, policy):
  """The rows of a table of the kinds that there are, the head first."""
  rows = [('kind', 'meaning', 'files', 'share', 'done')]
  total = sum(len(split.findings) for split in splits)
  for kind, number in actions_lib.count(splits).items():
    share = f'{100 * number / total:.2f} %'
    rows.append((kind, actions_lib.MEANINGS[kind], f'{number:,}', share, policy[kind]))
  return rows


def _markdown(name, splits, policy):
  folders = ['folder', *(split.listing.root for split in splits)]
  rows = [(row[0], folder, *row[1:]) for folder, row in zip(folders, _split_rows(splits))]
  yield from (f'# {name}: findings and actions', '', markdown.table(rows, 'llrrrl'), '')
  head, *rows = _kind_rows(splits, policy)
  rows = [(*row, _first_files(splits, row[0])) for row in rows]
  yield from (markdown.table([(*head, 'first files'), *rows], 'llrrl'), '')
  yield 'A file of several kinds counts in each; its action is the strictest of theirs.'
  yield f'Every file of a kind is a line of {LINES}.'
  for line in [*_reduced(splits), *_left_out(splits)]:
    yield from ('', markdown.escape(line))


def _first_files(splits, kind):
  files = [
    f'{split.name}: {split.listing.files[i]}'
    for split in splits
    for i in _of_kinds(split, [kind])[:_FIRST]
  ]
  return ', '.join(files[:_FIRST])


def _line(split, i):
  finding, listing = split.findings[i], split.listing
  result = {
    'split': split.name,
    'file': listing.files[i],
    'class': listing.vocabulary.names[listing.labels[i]],
    'kinds': [kind for kind in actions_lib.KINDS if split.kinds[kind][i]],
    'done': actions_lib.ACTIONS[split.actions[i]],
    'bytes': finding.size,
    'format': finding.format,
    'height': finding.height,
    'width': finding.width,
  }
  if finding.reason:
    result['reason'] = finding.reason
  if i in split.equals:
    other, j = split.equals[i]
    result['equals'] = {'split': other.name, 'file': other.listing.files[j]}
  return result
