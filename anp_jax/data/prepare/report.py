"""The report of a preparation: tables for people, lines for programs."""

import json
import os

import numpy as np

from anp_jax.data.prepare import actions as plan_lib
from anp_jax.system import markdown

MARKDOWN, LINES = 'report.md', 'damaged.jsonl'

_FIRST = 3  # files named for each kind


def write(folder: str, name: str, splits: list[plan_lib.Split], policy: dict) -> None:
  """Writes report.md and damaged.jsonl, the same for the same data.

  Args:
    folder: to write to.
    name: of the set.
    splits: with their actions, from `plan.decide`.
    policy: the action of each kind.
  """
  with open(os.path.join(folder, MARKDOWN), 'w', encoding='utf-8', errors='backslashreplace') as f:
    f.write('\n'.join(_markdown(name, splits, policy)) + '\n')
  with open(os.path.join(folder, LINES), 'w', encoding='utf-8') as f:
    for split in splits:
      for i in np.flatnonzero(split.kinds).tolist():
        f.write(json.dumps(_line(splits, split, i)) + '\n')


def summary(splits: list[plan_lib.Split], policy: dict) -> list[str]:
  """Returns the lines that a preparation ends with."""
  classes = splits[0].listing.vocabulary
  lines = [classes.text()]
  lines.append(markdown.plain(_split_rows(splits), 'lr'))
  rows = [('kind', 'files', 'share', 'done', 'meaning')]
  for kind, number, share in _counts(splits):
    rows.append((kind, f'{number:,}', share, policy[kind], plan_lib.MEANINGS[kind]))
  if len(rows) > 1:
    lines += ['', markdown.plain(rows, 'lrrl')]
  else:
    lines += ['', 'no file is damaged or unusual']
  return lines + _left_out(splits)


def first(splits: list[plan_lib.Split], kinds) -> str:
  """Returns the path and kind of the first file of any of the kinds."""
  for split in splits:
    for i in np.flatnonzero(split.kinds).tolist():
      for kind in kinds:
        if split.kinds[i] & plan_lib.bit(kind):
          path = os.path.join(split.listing.root, split.listing.files[i])
          reason = split.reasons.get(i)
          return f'{path} ({kind}{f": {reason}" if reason else ""})'
  return ''


def _left_out(splits):
  """Lines about files that were not examined; one where splits share them."""
  return [*dict.fromkeys(filter(None, (s.listing.left_out for s in splits)))]


def _split_rows(splits):
  """The rows of a table of splits, the head first."""
  rows = [('split', 'files', 'images', 'converted', 'smallest class')]
  for split in splits:
    rows.append(
      (
        split.name,
        f'{len(split):,}',
        f'{len(split.stored):,}',
        f'{len(split.converted):,}',
        _smallest(split),
      )
    )
  return rows


def _smallest(split):
  labels = split.listing.labels[split.stored]
  classes = split.listing.vocabulary
  counts = np.bincount(labels, minlength=len(classes))
  i = int(counts.argmin())
  return f'{counts[i]:,} ({classes.names[i]})'


def _counts(splits):
  """Yields each kind that there is, its files and their share."""
  total = sum(map(len, splits))
  for kind in plan_lib.KINDS:
    number = sum(int(s.of_kind(kind).sum()) for s in splits)
    if number:
      yield kind, number, f'{100 * number / total:.2f} %'


def _markdown(name, splits, policy):
  yield f'# {name}: findings and actions'
  yield ''
  folders = ['folder', *(split.listing.root for split in splits)]
  rows = [(name, folder, *counts) for folder, (name, *counts) in zip(folders, _split_rows(splits))]
  yield markdown.table(rows, 'llrrrl')
  yield ''
  rows = [('kind', 'meaning', 'files', 'share', 'done', 'first files')]
  for kind, number, share in _counts(splits):
    files = [
      f'{split.name}: {split.listing.files[i]}'
      for split in splits
      for i in np.flatnonzero(split.of_kind(kind))[:_FIRST]
    ]
    rows.append(
      (kind, plan_lib.MEANINGS[kind], f'{number:,}', share, policy[kind], ', '.join(files[:_FIRST]))
    )
  yield markdown.table(rows, 'llrrl')
  yield ''
  yield (
    'A file of several kinds counts in each; its action is the strictest of '
    f'theirs. Every file of a kind is a line of {LINES}.'
  )
  for line in _left_out(splits):
    yield ''
    yield markdown.escape(line)


def _line(splits, split, i):
  height, width = split.shapes[i].tolist()
  result = {
    'split': split.name,
    'file': split.listing.files[i],
    'class': split.listing.vocabulary.names[split.listing.labels[i]],
    'kinds': [k for k in plan_lib.KINDS if split.kinds[i] & plan_lib.bit(k)],
    'done': plan_lib.ACTIONS[split.actions[i]],
    'bytes': int(split.sizes[i]),
    'format': split.formats[i],
    'height': height,
    'width': width,
  }
  if i in split.reasons:
    result['reason'] = split.reasons[i]
  if i in split.equals:
    name, j = split.equals[i]
    other = next(s for s in splits if s.name == name)
    result['equals'] = {'split': name, 'file': other.listing.files[j]}
  return result
