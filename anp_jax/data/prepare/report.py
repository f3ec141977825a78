"""The report of a preparation: tables for people, lines for programs."""

from collections.abc import Iterable
import json
import os

import numpy as np

from anp_jax.data.prepare import actions as plan_lib
from anp_jax.system import files as files_lib, markdown

MARKDOWN, LINES = 'report.md', 'damaged.jsonl'

_FIRST = 3  # files named for each kind


def write(folder: str, name: str, splits: list[plan_lib.Split], policy: dict) -> None:
  """Writes report.md and damaged.jsonl, the same for the same data.

  Args:
    folder: to write to.
    name: of the set.
    splits: with their actions, from `actions.decide`.
    policy: the action of each kind.
  """
  page = '\n'.join(_markdown(name, splits, policy)) + '\n'
  files_lib.write_atomic(os.path.join(folder, MARKDOWN), page)
  with open(os.path.join(folder, LINES), 'w', encoding='utf-8') as file:
    for split in splits:
      for i in _of_kinds(split, plan_lib.KINDS):
        file.write(json.dumps(_line(split, i)) + '\n')


def summary(splits: list[plan_lib.Split], policy: dict) -> list[str]:
  """Returns the lines that a preparation ends with."""
  classes = splits[0].listing.vocabulary
  rows = [(kind, *numbers, meaning) for kind, meaning, *numbers in _kind_rows(splits, policy)]
  kinds = markdown.plain(rows, 'lrrl') if len(rows) > 1 else 'no file is damaged or unusual'
  splits_table = markdown.plain(_split_rows(splits), 'lr')
  return [classes.text(), splits_table, '', kinds, *_left_out(splits)]


def first(splits: list[plan_lib.Split], kinds: Iterable[str]) -> str:
  """Returns the path and kind of the first file of any of the kinds."""
  split, i = next((split, i) for split in splits for i in _of_kinds(split, kinds))
  kind = next(kind for kind in kinds if split.kinds[kind][i])
  reason = split.rows[i].finding.reason
  return f'{split.listing.paths()[i]} ({kind}{f": {reason}" if reason else ""})'


def _of_kinds(split, kinds):
  """Indices of the files of any of the kinds."""
  return np.flatnonzero(np.any([split.kinds[kind] for kind in kinds], 0)).tolist()


def _left_out(splits):
  """Lines about files that were not examined; one where splits share them."""
  return [*dict.fromkeys(filter(None, (s.listing.left_out for s in splits)))]


def _split_rows(splits):
  """The rows of a table of splits, the head first."""
  rows = [('split', 'files', 'images', 'converted', 'smallest class')]
  for split in splits:
    counts = [f'{n:,}' for n in (len(split), len(split.stored), len(split.converted))]
    rows.append((split.name, *counts, _smallest(split)))
  return rows


def _smallest(split):
  labels = split.listing.labels[split.stored]
  classes = split.listing.vocabulary
  counts = np.bincount(labels, minlength=len(classes))
  i = int(counts.argmin())
  return f'{counts[i]:,} ({classes.names[i]})'


def _kind_rows(splits, policy):
  """The rows of a table of the kinds that there are, the head first."""
  rows = [('kind', 'meaning', 'files', 'share', 'done')]
  total = sum(map(len, splits))
  for kind, meaning in plan_lib.MEANINGS.items():
    number = sum(int(split.kinds[kind].sum()) for split in splits)
    if number:
      rows.append((kind, meaning, f'{number:,}', f'{100 * number / total:.2f} %', policy[kind]))
  return rows


def _markdown(name, splits, policy):
  folders = ['folder', *(split.listing.root for split in splits)]
  rows = [(row[0], folder, *row[1:]) for folder, row in zip(folders, _split_rows(splits))]
  yield from (f'# {name}: findings and actions', '', markdown.table(rows, 'llrrrl'), '')
  head, *rows = _kind_rows(splits, policy)
  rows = [(*row, _first_files(splits, row[0])) for row in rows]
  yield markdown.table([(*head, 'first files'), *rows], 'llrrl')
  yield ''
  yield (
    'A file of several kinds counts in each; its action is the strictest of '
    f'theirs. Every file of a kind is a line of {LINES}.'
  )
  for line in _left_out(splits):
    yield from ('', markdown.escape(line))


def _first_files(splits, kind):
  files = [
    f'{split.name}: {split.listing.files[i]}'
    for split in splits
    for i in _of_kinds(split, [kind])[:_FIRST]
  ]
  return ', '.join(files[:_FIRST])


def _line(split, i):
  row, listing = split.rows[i], split.listing
  result = {
    'split': split.name,
    'file': listing.files[i],
    'class': listing.vocabulary.names[listing.labels[i]],
    'kinds': split.kinds_of(i),
    'done': plan_lib.ACTIONS[split.actions[i]],
    'bytes': row.size,
    'format': row.finding.format,
    'height': row.finding.height,
    'width': row.finding.width,
  }
  if row.finding.reason:
    result['reason'] = row.finding.reason
  if i in split.equals:
    other, j = split.equals[i]
    result['equals'] = {'split': other.name, 'file': other.listing.files[j]}
  return result
