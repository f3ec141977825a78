"""Prepares a folder of images: examines all, decides, then writes shards."""

import hashlib
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
)

# Version of the files that tasks leave: with another one, none is used again.
_VERSION = 3
_FILES = 256  # of a task
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
  lines = preparation.target.run(
    flags.overwrite, flags.workers, preparation.make, preparation.changed
  )
  return [*lines, '', *preparation.command()]


class _Preparation:
  """One set in the making."""

  def __init__(self, flags):
    self._start = time.monotonic()
    self._flags = flags
    self._policy = plan_lib.policy(flags.policy)
    self._names, self._listings = splits_lib.find(flags)
    self._classes = self._listings[0].vocabulary
    files = _digest_of_files(self._names, self._listings)
    self._options = {
      'policy': self._policy,
      'max_megapixels': flags.max_megapixels,
      'min_size': flags.min_size,
      'min_count': flags.min_count,
      'shard_megabytes': flags.shard_megabytes,
    }
    digest = hashlib.sha256(json.dumps([files, self._options], sort_keys=True).encode()).hexdigest()
    self.target = target_lib.Target(
      anp_folder_files.folder(flags.data_dir, flags.name),
      # What was examined serves other policies too.
      os.path.join(flags.data_dir, anp_folder_files.NAME, f'.{flags.name}.{files[:16]}'),
      digest,
    )
    self._folder = self._states = None  # known when all is examined

  def make(self, pool) -> list[str]:
    """Makes the set; returns lines to print."""
    if not self._flags.policy:  # which may leave out most of them
      self._check_room(room.listed_bytes(self._listings))
    splits = self._examine(pool)
    plan_lib.decide(splits, self._policy, self._flags.min_size, self._flags.min_count)
    self._refuse(splits)
    unchanged = [np.setdiff1d(s.stored, s.converted) for s in splits]
    self._check_room(sum(int(s.sizes[i].sum()) for s, i in zip(splits, unchanged)))
    converted = self._convert(pool, splits)
    shards = self._write(pool, splits, converted)
    self._finish(splits, shards)
    return [
      '',
      f'{self.target.final}: made in {time.monotonic() - self._start:.1f} s',
      *report_lib.summary(splits, self._policy),
      f'details: {os.path.join(self.target.final, report_lib.MARKDOWN)}',
    ]

  def _check_room(self, size):
    room.check(self._flags.data_dir, self.target.work, size)

  def changed(self) -> str | None:
    """Returns the first file that is not as it was for the finished set."""
    paths = [
      os.path.join(listing.root, file) for listing in self._listings for file in listing.files
    ]
    try:
      before = np.load(os.path.join(self.target.final, _STATES))
    except (OSError, ValueError):
      return paths[0]
    now = room.states(self._listings)
    changed = np.flatnonzero((now != before).any(1))
    return paths[changed[0]] if len(changed) else None

  def command(self) -> list[str]:
    """Returns the lines that say how to train on the set."""
    words = [
      'python',
      'main.py',
      '--config=configs/resnet_anp.py',
      f'--config.data.source=tfds:{anp_folder_files.NAME}/{self._flags.name}',
      f'--config.data.dir={self._flags.data_dir}',
    ]
    for key, name, default in zip(
      ('train_split', 'eval_split'), self._names, splits_lib.DEFAULT_NAMES
    ):
      if name != default:
        words.append(f'--config.data.{key}={name}')
    lines = []
    if len(self._names) == 1:
      words.append(f'--config.data.eval_split={self._names[0]}')
      lines = ['no evaluation split: scores will be of the training images']
    return [*lines, f'train with: {shlex.join(words)}']

  def _examine(self, pool):
    """All splits, examined."""
    tasks = {name: [] for name in self._names}
    for name, listing in zip(self._names, self._listings):
      for i in range(0, len(listing.files), _FILES):
        indices = np.arange(i, min(i + _FILES, len(listing.files)))
        task = tasks_lib.Examine(
          root=listing.root,
          files=listing.files[i : i + _FILES],
          storage=listing.storage.select(indices),
          out=os.path.join(self.target.work, 'examined', f'{name}-{i // _FILES:06}.jsonl'),
          max_megapixels=self._flags.max_megapixels,
        )
        tasks[name].append(task)
    all_tasks = sum(tasks.values(), [])
    pool.verify('verifying', all_tasks)
    pool.make('examining', all_tasks)
    splits, states = [], []
    for name, listing in zip(self._names, self._listings):
      rows = _rows(tasks[name])
      splits.append(_split(name, listing, rows))
      states += [row[-2:] for row in rows]
    self._states = np.array(states, np.int64)
    self._folder = self.target.choose_folder(_digest_of_findings(splits))
    return splits

  def _refuse(self, splits):
    """Raises where a policy says so, or where nothing would be left."""
    failures = plan_lib.failures(splits, self._policy)
    empty = next((s for s in splits if not len(s.stored)), None)
    if not failures and empty is None:
      return
    report_lib.write(self._folder, self._flags.name, splits, self._policy)
    report = os.path.join(self._folder, report_lib.MARKDOWN)
    if failures:
      counts = ', '.join(f'{n:,} {kind}' for kind, n in failures.items())
      raise config_lib.ConfigError(
        f'the policy forbids {counts} files, first '
        f'{report_lib.first(splits, failures)}; report: {report}'
      )
    left_out = [k for k, n in plan_lib.count(empty).items() if n]
    raise config_lib.ConfigError(
      f'none of the {len(empty):,} files of {empty.listing.name} is left, '
      f'first {report_lib.first([empty], left_out)}; report: {report}'
    )

  def _convert(self, pool, splits):
    """Converts the files of each `Examine` task that are to be converted.

    Returns:
      {(split's name, index of the `Examine` task): path of the result}.
    """
    tasks = {}
    for split in splits:
      for number in np.unique(split.converted // _FILES).tolist():
        indices = split.converted[split.converted // _FILES == number]
        name = f'{split.name}-{number:06}.bin'
        tasks[split.name, number] = tasks_lib.Convert(
          out=os.path.join(self._folder, 'converted', name), **self._inputs(split, indices)
        )
    pool.make('converting', [*tasks.values()])
    return {key: task.out for key, task in tasks.items()}

  def _write(self, pool, splits, converted):
    """Writes all shards; {split's name: tasks, one for each shard}."""
    tasks = {}
    for split in splits:
      shards = plan_lib.shards(split, self._flags.shard_megabytes << 20)
      tasks[split.name] = [
        self._shard_task(split, i, shards, converted) for i in range(len(shards))
      ]
    os.makedirs(os.path.join(self._folder, 'set'), exist_ok=True)
    pool.make('writing', sum(tasks.values(), []))
    return tasks

  def _shard_task(self, split, i, shards, converted):
    indices = shards[i]
    is_converted = split.actions[indices] == plan_lib.CONVERT
    stretches = []
    for number in np.unique(indices[is_converted] // _FILES).tolist():
      # The shard may begin or end within a `Convert` task.
      stored = split.converted[split.converted // _FILES == number]
      inside = np.flatnonzero(np.isin(stored, indices))
      stretches.append(
        tasks_lib.Stretch(converted[split.name, number], int(inside[0]), len(inside))
      )
    name = anp_folder_files.shard(split.name, i, len(shards))
    return tasks_lib.Write(
      out=os.path.join(self._folder, 'written', f'{name}.json'),
      shard=os.path.join(self._folder, 'set', name),
      labels=split.listing.labels[indices],
      converted=is_converted,
      stretches=stretches,
      classes=self._classes,
      **self._inputs(split, indices),
    )

  def _inputs(self, split, indices):
    """What `Convert` and `Write` read: the files of these indices."""
    return {
      'root': split.listing.root,
      'files': [split.listing.files[i] for i in indices],
      'storage': split.listing.storage.select(indices),
      'digests': [split.digests[i] for i in indices],
      'work': self.target.work,
    }

  def _finish(self, splits, tasks):
    """Adds the description of the shards, and moves all to the final place."""
    from anp_jax.data.prepare import anp_folder  # tfds: slow to import

    folder = os.path.join(self._folder, 'set')
    shards = {os.path.basename(task.shard) for group in tasks.values() for task in group}
    for name in set(os.listdir(folder)) - shards:  # of a command that died
      os.remove(os.path.join(folder, name))
    report_lib.write(folder, self._flags.name, splits, self._policy)
    infos = {}
    for name, group in tasks.items():
      contents = [_read_json(task.out) for task in group]
      lengths = [content['examples'] for content in contents]
      infos[name] = (lengths, sum(content['bytes'] for content in contents))
    anp_folder.write_info(folder, self._flags.name, self._classes, infos, self._metadata(splits))
    np.save(os.path.join(folder, _STATES), self._states)
    digest = hashlib.sha256(self._states.tobytes()).hexdigest()
    self.target.finish(folder, digest)

  def _metadata(self, splits):
    return {
      'from': [listing.root for listing in self._listings],
      **self._options,
      'files': {
        s.name: {
          'listed': len(s),
          'stored': len(s.stored),
          'converted': len(s.converted),
          **plan_lib.count(s),
        }
        for s in splits
      },
    }


def _digest_of_files(names, listings):
  classes = listings[0].vocabulary
  digest = hashlib.sha256()
  for item in (
    _VERSION,
    names,
    classes.names,
    classes.adjectives,
    classes.nouns,
    *((os.path.abspath(f.root), f.files, f.labels.tolist()) for f in listings),
  ):
    digest.update(json.dumps(item).encode() + b'\n')
  return digest.hexdigest()


def _digest_of_findings(splits):
  """The digest of all that decides, with the options, about the set."""
  digest = hashlib.sha256()
  for split in splits:
    for data in split.digests:
      digest.update(data.ljust(32, b'\0'))
    digest.update(split.kinds.tobytes() + split.shapes.tobytes())
  return digest.hexdigest()


def _rows(tasks):
  """The rows of a split's files, as its `Examine` tasks wrote them."""
  rows = [row for task in tasks for row in tasks_lib.read_rows(task.out)]
  if len(rows) != sum(len(task.files) for task in tasks):
    raise config_lib.ConfigError(f'{os.path.dirname(tasks[0].out)} has damaged files: delete it')
  return rows


def _split(name, listing, rows):
  kinds = [sum(map(plan_lib.bit, row.kinds)) for row in rows]
  return plan_lib.Split(
    name,
    listing,
    sizes=np.array([row.size for row in rows], np.int64),
    shapes=np.array([(row.height, row.width) for row in rows], np.int32),
    kinds=np.array(kinds, np.uint32),
    digests=[bytes.fromhex(row.digest) for row in rows],
    formats=[row.format for row in rows],
    reasons={i: row.reason for i, row in enumerate(rows) if row.reason},
  )


def _read_json(path):
  with open(path) as file:
    return json.load(file)
