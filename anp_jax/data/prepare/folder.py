"""Prepares a folder of images: examines all, decides, then writes shards."""

import hashlib
import itertools
import json
import os
import shlex
import time

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.prepare import (
  actions as plan_lib,
  anp_folder_files,
  prepared_target as target_lib,
  report as report_lib,
  room,
  splits as splits_lib,
  tasks as tasks_lib,
  worker_pool,
)

# Version of the shards: those of another one are not used again.
_VERSION = 4
_DAMAGED = {'missing', 'corrupt', 'large', 'truncated'}
_FILES = 256  # that a worker examines in one go
# In a finished set: (n, 2) int64, the state of every file.
_STATES = 'prepared.npy'


def prepare(flags) -> list[str]:
  """Makes the set that the command line asks for, or finds it made.

  Args:
    flags: of `prepare.main`.

  Returns:
    Lines to print.

  Raises:
    ConfigError: if the input is bad, or a policy forbids the set.
  """
  preparation = _Preparation(flags)
  lines = preparation.target.run(flags.overwrite, preparation.make, preparation.changed)
  return [*lines, '', *preparation.command()]


class _Preparation:
  """One set in the making."""

  def __init__(self, flags):
    self._start = time.monotonic()
    self._flags = flags
    self._policy = plan_lib.policy(flags.policy)
    self._names, self._listings = splits_lib.find(flags)
    self._classes = self._listings[0].vocabulary
    # Before the files are read: a change in between is noticed.
    self._states = room.states(self._listings)
    self._options = {
      'policy': self._policy,
      'max_megapixels': flags.max_megapixels,
      'min_size': flags.min_size,
      'min_count': flags.min_count,
      'shard_megabytes': flags.shard_megabytes,
    }
    folder = os.path.join(flags.data_dir, anp_folder_files.NAME)
    self.target = target_lib.Target(
      anp_folder_files.folder(flags.data_dir, flags.name),
      os.path.join(folder, f'.{flags.name}'),
      self._digest(),
    )

  def make(self) -> list[str]:
    """Makes the set; returns lines to print."""
    if not self._flags.policy:  # which may leave out most of them
      self._check_room(room.listed_bytes(self._listings, self._states[:, 0]))
    splits = self._examine()
    plan_lib.decide(splits, self._policy, self._flags.min_size, self._flags.min_count)
    self._refuse(splits)
    unchanged = [np.setdiff1d(s.stored, s.converted) for s in splits]
    self._check_room(sum(int(s.sizes[i].sum()) for s, i in zip(splits, unchanged)))
    self._write(splits)
    return [
      '',
      f'{self.target.final}: made in {time.monotonic() - self._start:.1f} s',
      *report_lib.summary(splits, self._policy),
      f'details: {os.path.join(self.target.final, report_lib.MARKDOWN)}',
    ]

  def changed(self) -> str | None:
    """Returns the first file that is not as it was for the finished set."""
    paths = [path for listing in self._listings for path in listing.paths()]
    try:
      before = np.load(os.path.join(self.target.final, _STATES))
    except (OSError, ValueError):
      return paths[0]
    changed = np.flatnonzero((self._states != before).any(1))
    return paths[changed[0]] if len(changed) else None

  def command(self) -> list[str]:
    """Returns the lines that say how to train on the set."""
    keys = {
      'source': f'tfds:{anp_folder_files.NAME}/{self._flags.name}',
      'dir': self._flags.data_dir,
      'train_split': self._names[0],
      'eval_split': self._names[-1],
    }
    for key, default in zip(('train_split', 'eval_split'), splits_lib.DEFAULT_NAMES):
      if keys[key] == default:
        del keys[key]
    words = [f'--config.data.{key}={value}' for key, value in keys.items()]
    lines = [f'train with: python main.py --config=configs/resnet_anp.py {shlex.join(words)}']
    if len(self._names) == 1:
      lines.insert(0, 'no evaluation split: scores will be of the training images')
    return lines

  def _digest(self):
    """The digest of all that the set depends on, but for the files' contents."""
    digest = hashlib.sha256()
    for item in (
      _VERSION,
      self._options,
      self._names,
      self._classes.names,
      self._classes.adjectives,
      self._classes.nouns,
      *((os.path.abspath(f.root), f.files, f.labels.tolist()) for f in self._listings),
    ):
      digest.update(json.dumps(item, sort_keys=True).encode() + b'\n')
    return digest.hexdigest()

  def _check_room(self, size):
    room.check(self._flags.data_dir, self.target.work, size)

  def _examine(self):
    """All splits, examined."""
    tasks = [
      tasks_lib.Examine(
        listing=listing.select(range(start, min(start + _FILES, len(listing.files)))),
        max_megapixels=self._flags.max_megapixels,
      )
      for listing in self._listings
      for start in range(0, len(listing.files), _FILES)
    ]
    results = worker_pool.run('examining', tasks, self._flags.workers, _count_damaged)
    rows = itertools.chain.from_iterable(results)
    return [
      plan_lib.Split(name, listing, [*itertools.islice(rows, len(listing.files))])
      for name, listing in zip(self._names, self._listings)
    ]

  def _refuse(self, splits):
    """Raises where a policy says so, or where nothing would be left."""
    failures = plan_lib.failures(splits, self._policy)
    empty = next((s for s in splits if not len(s.stored)), None)
    if failures:
      counts = ', '.join(f'{n:,} {kind}' for kind, n in failures.items())
      text = f'the policy forbids {counts} files'
      first = report_lib.first(splits, failures)
    elif empty:
      text = f'none of the {len(empty):,} files of {empty.listing.name} is left'
      first = report_lib.first([empty], plan_lib.KINDS)
    else:
      return
    report_lib.write(self.target.work, self._flags.name, splits, self._policy)
    report = os.path.join(self.target.work, report_lib.MARKDOWN)
    raise config_lib.ConfigError(f'{text}, first {first}; report: {report}')

  def _write(self, splits):
    """Writes the shards and their description, and moves all to the final place."""
    from anp_jax.data.prepare import anp_folder  # tfds: slow to import

    shards = {}  # indices of files, by name of the shard
    lengths = {}
    for split in splits:
      parts = plan_lib.shards(split, self._flags.shard_megabytes << 20)
      lengths[split.name] = [len(indices) for indices in parts]
      for i, indices in enumerate(parts):
        shards[anp_folder_files.shard(split.name, i, len(parts))] = split, indices
    folder = self.target.folder(_digest_of_findings(splits), shards)
    finished = os.listdir(folder)
    tasks = [
      self._shard_task(os.path.join(folder, name), *part)
      for name, part in shards.items()
      if name not in finished
    ]
    worker_pool.run('writing', tasks, self._flags.workers)
    report_lib.write(folder, self._flags.name, splits, self._policy)
    anp_folder.write_info(folder, self._flags.name, self._classes, lengths, self._metadata(splits))
    np.save(os.path.join(folder, _STATES), self._states)
    self.target.finish(folder)

  def _shard_task(self, path, split, indices):
    return tasks_lib.Write(
      listing=split.listing.select(indices),
      digests=[split.rows[i].digest for i in indices],
      converted=split.actions[indices] == plan_lib.CONVERT,
      out=path,
    )

  def _metadata(self, splits):
    files = {
      s.name: {
        'listed': len(s),
        'stored': len(s.stored),
        'converted': len(s.converted),
        **plan_lib.count(s),
      }
      for s in splits
    }
    return {'from': [f.root for f in self._listings], **self._options, 'files': files}


def _count_damaged(rows):
  return sum(not _DAMAGED.isdisjoint(row.finding.kinds) for row in rows)


def _digest_of_findings(splits):
  """The digest of the files' contents, and of what is done about them."""
  digest = hashlib.sha256()
  for split in splits:
    digest.update(b''.join(row.digest for row in split.rows) + split.actions.tobytes())
  return digest.hexdigest()
