"""Prepares a folder of images: examines all, decides, then writes shards."""

import argparse
import functools
import hashlib
import itertools
import os
import shlex
import time

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.prepare import (
  actions as actions_lib,
  anp_folder_files,
  examine,
  prepared_target as target_lib,
  report as report_lib,
  splits as splits_lib,
  tasks as tasks_lib,
  worker_pool,
)

# Version of the shards: those of another one are not used again.
_VERSION = 6
_DAMAGED = {'missing', 'corrupt', 'large', 'truncated'}
_FILES = 256  # files that a worker examines in one task
_OPTIONS = ('max_megapixels', 'min_size', 'min_count', 'shard_megabytes')


def prepare(flags: argparse.Namespace) -> list[str]:
  """Makes the set that the command line asks for, or finds it made.

  Args:
    flags: command line of `prepare.main`.

  Returns:
    Lines to print.

  Raises:
    ConfigError: if the input is bad, or a policy forbids the set.
  """
  start = time.monotonic()
  policy = actions_lib.policy(flags.policy)
  names, listings = splits_lib.find(flags)
  options = {'policy': policy, **{key: getattr(flags, key) for key in _OPTIONS}}
  if flags.shorter_side:
    options |= {'shorter_side': flags.shorter_side, 'quality': flags.quality}
  files = [(os.path.abspath(f.root), f.files, f.labels.tolist()) for f in listings]
  content = (_VERSION, options, names, listings[0].vocabulary.to_json(), files)
  # Before the files are read: a later change is noticed.
  states = np.concatenate([listing.states() for listing in listings])
  paths = [path for listing in listings for path in listing.paths()]
  target = target_lib.Target(flags.data_dir, flags.name, content, paths, states)

  def make():
    from anp_jax.data.prepare import anp_folder  # tfds: slow to import

    findings = _examine(listings, flags)
    splits = [
      actions_lib.Split(*items, flags.shorter_side) for items in zip(names, listings, findings)
    ]
    actions_lib.decide(splits, policy, flags.min_size, flags.min_count)
    _refuse(splits, policy, flags.name, target.work)
    target.check_room(sum(split.stored_bytes() for split in splits))
    folder, lengths = _write(splits, flags, target)
    report_lib.write(folder, flags.name, splits, policy)
    metadata = {'from': [listing.root for listing in listings], **options}
    metadata['files'] = {split.name: split.counts() for split in splits}
    anp_folder.write_info(folder, flags.name, listings[0].vocabulary, lengths, metadata)
    target.finish(folder)
    return [
      '',
      f'{target.final}: made in {time.monotonic() - start:.1f} s',
      *report_lib.summary(splits, policy),
      f'details: {os.path.join(target.final, report_lib.MARKDOWN)}',
    ]

  return [*target.run(flags.overwrite, make), '', *_command(flags, names)]


def _command(flags, names):
  """Lines that say how to train on the set."""
  source = f'tfds:{anp_folder_files.NAME}/{flags.name}'
  words = [f'--config.data.source={source}', f'--config.data.dir={flags.data_dir}']
  splits = {'train_split': names[0], 'eval_split': names[-1]}
  for (key, name), default in zip(splits.items(), splits_lib.DEFAULT_NAMES):
    words += [f'--config.data.{key}={name}'] * (name != default)
  words += [f'--config.data.pairs={flags.pairs}'] * (flags.pairs != 'auto')
  if len(names) == 1:
    yield 'no evaluation split: scores will be of the training images'
  yield f'train with: python main.py --config=configs/resnet_anp.py {shlex.join(words)}'


def _examine(listings, flags):
  """The findings in the files of each listing."""
  tasks = [
    (listing.select(range(start, min(start + _FILES, len(listing.files)))), flags.max_megapixels)
    for listing in listings
    for start in range(0, len(listing.files), _FILES)
  ]
  results = worker_pool.run(
    'examining', tasks_lib.examine_files, tasks, flags.workers, _count_damaged
  )
  findings = itertools.chain.from_iterable(results)
  return [[*itertools.islice(findings, len(listing.files))] for listing in listings]


def _count_damaged(findings):
  return sum(not _DAMAGED.isdisjoint(finding.kinds) for finding in findings)


def _refuse(splits, policy, name, folder):
  """Raises where a policy says so, or where nothing would be left."""
  counts = actions_lib.count(splits)
  failures = {kind: n for kind, n in counts.items() if policy[kind] == 'fail'}
  empty = next((split for split in splits if not len(split.stored)), None)
  if failures:
    text = ', '.join(f'{n:,} {kind}' for kind, n in failures.items())
    text = f'the policy forbids {text} files, first {report_lib.first(splits, failures)}'
  elif empty:
    text = f'none of the {len(empty.findings):,} files of {empty.listing.name} is left'
    text += f', first {report_lib.first([empty], actions_lib.KINDS)}'
  else:
    return
  report_lib.write(folder, name, splits, policy)
  raise config_lib.ConfigError(f'{text}; report: {os.path.join(folder, report_lib.MARKDOWN)}')


def _write(splits, flags, target):
  """Writes the shards; returns their folder, and the examples of each by split."""
  shards, lengths = {}, {}
  digest = hashlib.sha256()  # of the files' bytes and of the actions on them
  for split in splits:
    digest.update(b''.join(f.digest for f in split.findings) + split.actions.tobytes())
    parts = actions_lib.shards(split, flags.shard_megabytes << 20)
    lengths[split.name] = [len(indices) for indices in parts]
    for i, indices in enumerate(parts):
      shards[anp_folder_files.shard(split.name, i, len(parts))] = (
        split.listing.select(indices),
        [split.findings[j].digest for j in indices],
        [_edit(split, j, flags.quality) for j in indices],
      )
  findings = digest.hexdigest()
  return target.write_shards(shards, flags.workers, findings), lengths


def _edit(split, index, quality):
  """A function from a file's bytes to those that are stored; None if they are the same."""
  is_converted = bool(split.actions[index] == actions_lib.CONVERT)
  shorter = split.shorter_side if split.is_reduced[index] else 0
  if not is_converted and not shorter:
    return None
  return functools.partial(examine.convert, upright=is_converted, shorter=shorter, quality=quality)
