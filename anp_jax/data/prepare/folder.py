"""Prepares a folder of images: examines all, decides, then writes shards."""

from concurrent import futures
import dataclasses
import functools
import hashlib
import json
import os
import re
import shlex
import time

import numpy as np

from anp_jax import config as config_lib
from anp_jax.data.prepare import anp_folder_files
from anp_jax.data.prepare import parts as parts_lib
from anp_jax.data.prepare import plan as plan_lib
from anp_jax.data.prepare import report as report_lib
from anp_jax.data.prepare import target as target_lib
from anp_jax.data.prepare import worker as worker_lib
from anp_jax.data.sources import image_folder

# Of what parts hold: another number starts anew.
_VERSION = 3
_FILES = 256  # of a part
_DEFAULT_NAMES = ('train', 'validation')
# In a finished set: (n, 2) int64, `worker.state` of every file.
_STATES = 'prepared.npy'
_STAT_THREADS = 16


def prepare(flags) -> list[str]:
  """Makes the set that the command line asks for, or finds it made.

  Args:
    flags: of `prepare.main`.

  Returns:
    Lines to print.

  Raises:
    ConfigError: if the input is bad, or a policy forbids the set.
  """
  work = _Preparation(flags)
  lines = work.target.run(flags.overwrite, work.make, work.changed)
  return lines if flags.share.process_id else [*lines, '', *work.command()]


class _Preparation:
  """One set in the making."""

  def __init__(self, flags):
    self._start = time.monotonic()
    self._flags = flags
    self._share = flags.share
    self._policy = plan_lib.policy(flags.policy)
    self._names, self._listings = _listings(flags)
    self._classes = self._listings[0].vocabulary
    files = _digest_of_files(self._names, self._listings)
    self._options = {
      'policy': self._policy,
      'max_megapixels': flags.max_megapixels,
      'min_size': flags.min_size,
      'min_count': flags.min_count,
      'shard_megabytes': flags.shard_megabytes,
    }
    digest = hashlib.sha256(
      json.dumps([files, self._options], sort_keys=True).encode()
    ).hexdigest()
    final = anp_folder_files.folder(flags.data_dir, flags.name)
    self.target = target_lib.Target(
      final,
      # What was examined serves other policies too.
      os.path.join(
        flags.data_dir, anp_folder_files.NAME, f'.{flags.name}.{files[:16]}'
      ),
      digest,
      flags.share,
    )
    self._own = self._states = None  # known when all is examined

  def make(self, pool):
    """Makes the set; lines to print."""
    splits = self._examined(pool)
    plan_lib.decide(
      splits, self._policy, self._flags.min_size, self._flags.min_count
    )
    self._refuse(splits)
    converted = self._convert(pool, splits)
    shards = self._write(pool, splits, converted)
    self.target.wait_unless_first(pool)
    self._finish(splits, shards)
    return [
      '',
      f'{self.target.final}: made in {time.monotonic() - self._start:.1f} s',
      *report_lib.summary(splits, self._policy),
      f'details: {os.path.join(self.target.final, report_lib.MARKDOWN)}',
    ]

  def changed(self):
    """The first file that is not as it was for the set that is there."""
    paths = [
      os.path.join(found.root, file)
      for found in self._listings
      for file in found.files
    ]
    try:
      before = np.load(os.path.join(self.target.final, _STATES))
    except (OSError, ValueError):
      return paths[0]
    parts = [paths[i : i + _FILES] for i in range(0, len(paths), _FILES)]
    with futures.ThreadPoolExecutor(_STAT_THREADS) as threads:
      now = np.concatenate([*threads.map(_states, parts)])
    changed = np.flatnonzero((now != before).any(1))
    return paths[changed[0]] if len(changed) else None

  def command(self):
    """The lines that say how to train on it."""
    words = [
      'python', 'main.py', '--config=configs/resnet_anp.py',
      f'--config.data.source=tfds:{anp_folder_files.NAME}/{self._flags.name}',
      f'--config.data.dir={self._flags.data_dir}',
    ]  # fmt: skip
    for key, name, usual in zip(
      ('train_split', 'eval_split'), self._names, _DEFAULT_NAMES
    ):
      if name != usual:
        words.append(f'--config.data.{key}={name}')
    lines = []
    if len(self._names) == 1:
      words.append(f'--config.data.eval_split={self._names[0]}')
      lines = ['no evaluation split: scores will be of the training images']
    return [*lines, f'train with: {shlex.join(words)}']

  def _examined(self, pool):
    """All splits, examined."""
    outs, parts = [], []
    for name, found in zip(self._names, self._listings):
      outs.append([])
      for i in range(0, len(found.files), _FILES):
        out = os.path.join(
          self.target.work, 'examined', f'{name}-{i // _FILES:06}.jsonl'
        )
        files = found.files[i : i + _FILES]
        outs[-1].append(out)
        make = functools.partial(
          self._task, 'examine', found.root, files, out=out,
          max_megapixels=self._flags.max_megapixels,
        )  # fmt: skip
        parts.append(parts_lib.Part(out, len(files), make))
    self.target.verify('verifying', parts, pool)
    self.target.make_all('examining', parts, pool)
    loaded = [
      _load(name, found, out)
      for name, found, out in zip(self._names, self._listings, outs)
    ]
    splits = [split for split, _ in loaded]
    self._states = np.concatenate([states for _, states in loaded])
    self._own = self.target.agree(_digest_of_findings(splits))
    return splits

  def _task(self, do, root, files, **more):
    return {
      'do': do,
      'what': f'{do} {files[0]} to {files[-1]} of {root}',
      'work': self.target.work,
      'root': root,
      'files': list(files),
      **more,
    }

  def _refuse(self, splits):
    """Raises where a policy says so, or where nothing would be left."""
    failed = plan_lib.failures(splits, self._policy)
    empty = next((s for s in splits if not len(s.stored)), None)
    if not failed and empty is None:
      return
    if self._share.process_id == 0:
      report_lib.write(self._own, self._flags.name, splits, self._policy)
    report = os.path.join(self._own, report_lib.MARKDOWN)
    if failed:
      counts = ', '.join(f'{n:,} {kind}' for kind, n in failed.items())
      raise config_lib.ConfigError(
        f'the policy forbids {counts} files, first '
        f'{report_lib.first(splits, failed)}; report: {report}'
      )
    left_out = [k for k, n in plan_lib.count(empty).items() if n]
    raise config_lib.ConfigError(
      f'none of the {len(empty):,} files of {empty.listing.name} is left, '
      f'first {report_lib.first([empty], left_out)}; report: {report}'
    )

  def _convert(self, pool, splits):
    """Converts in parts of _FILES; their outs by (split's name, number)."""
    outs, parts = {}, []
    for split in splits:
      numbers = split.converted // _FILES
      for number in np.unique(numbers).tolist():
        chosen = split.converted[numbers == number].tolist()
        out = os.path.join(
          self._own, 'converted', f'{split.name}-{number:06}.bin'
        )
        outs[split.name, number] = out
        make = functools.partial(
          self._chosen, 'convert', split, chosen, out=out
        )
        parts.append(parts_lib.Part(out, len(chosen), make))
    if parts:
      self.target.make_all('converting', parts, pool)
    return outs

  def _chosen(self, do, split, chosen, **more):
    files = [split.listing.files[i] for i in chosen]
    digests = [split.digests[i].hex() for i in chosen]
    return self._task(do, split.listing.root, files, digests=digests, **more)

  def _write(self, pool, splits, converted):
    """Writes all shards; {split's name: files that say what they hold}."""
    outs, parts = {}, []
    for split in splits:
      shards = plan_lib.shards(split, self._flags.shard_megabytes << 20)
      outs[split.name] = []
      for i, chosen in enumerate(shards):
        name = anp_folder_files.shard(split.name, i, len(shards))
        out = os.path.join(self._own, 'written', f'{name}.json')
        outs[split.name].append(out)
        make = functools.partial(
          self._shard, split, chosen, converted, out,
          os.path.join(self._own, 'set', name),
        )  # fmt: skip
        parts.append(parts_lib.Part(out, len(chosen), make))
    os.makedirs(os.path.join(self._own, 'set'), exist_ok=True)
    self.target.make_all('writing', parts, pool)
    return outs

  def _shard(self, split, chosen, converted, out, shard):
    turned = split.actions[chosen] == plan_lib.CONVERT
    parts = []
    for number in np.unique(chosen[turned] // _FILES).tolist():
      # The shard may begin or end within a part.
      part = split.converted[split.converted // _FILES == number]
      inside = np.flatnonzero(np.isin(part, chosen))
      parts.append((converted[split.name, number], int(inside[0]), len(inside)))
    classes = self._classes
    return self._chosen(
      'write',
      split,
      chosen.tolist(),
      out=out,
      shard=shard,
      labels=split.listing.labels[chosen].tolist(),
      converted=turned.tolist(),
      parts=parts,
      vocabulary=[classes.names, classes.adjectives, classes.nouns],
    )

  def _finish(self, splits, outs):
    """Adds what describes the shards, and moves all to the final place."""
    from anp_jax.data.prepare import anp_folder  # tfds: slow to import

    infos = {}
    for split in splits:
      shards = [_json(out) for out in outs[split.name]]
      lengths = [shard['examples'] for shard in shards]
      infos[split.name] = (lengths, sum(shard['bytes'] for shard in shards))
    made = os.path.join(self._own, 'set')
    # Drafts of processes that were killed.
    wanted = {
      os.path.basename(o)[:-5] for group in outs.values() for o in group
    }
    for name in set(os.listdir(made)) - wanted:
      os.remove(os.path.join(made, name))
    report_lib.write(made, self._flags.name, splits, self._policy)
    anp_folder.write_info(
      made, self._flags.name, self._classes, infos, self._metadata(splits)
    )
    np.save(os.path.join(made, _STATES), self._states)
    self.target.finish(made, hashlib.sha256(self._states.tobytes()).hexdigest())

  def _metadata(self, splits):
    return {
      'from': [found.root for found in self._listings],
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


def _listings(flags):
  """The splits' names in the set, and what they list."""
  chosen = [flags.train_split] + [flags.eval_split] * bool(flags.eval_split)
  names = []
  for split, usual in zip(chosen, _DEFAULT_NAMES):
    # 'all' means every split to tfds.
    plain = re.fullmatch(r'[A-Za-z]\w*', split, re.ASCII) and split != 'all'
    names.append(split if plain else usual)
  if len(set(names)) < len(names):
    names = list(_DEFAULT_NAMES)
  if len(set(chosen)) < len(chosen):
    raise config_lib.ConfigError(
      f'--train_split and --eval_split are both {flags.train_split!r}'
    )
  listings = []
  for i, split in enumerate(chosen):
    others = tuple(chosen[:i] + chosen[i + 1 :])
    root = os.path.expanduser(flags.source)
    whole = not others and split == 'train' and not _has_splits(root)
    try:
      found = image_folder.find(
        flags.source, '' if whole else split, flags.lists, other_splits=others,
        suffixes=(*image_folder.SUFFIXES, *image_folder.convertible()),
        pairs=flags.pairs,
      )  # fmt: skip
      classes = found.vocabulary.with_pairs(flags.pairs)
      found = dataclasses.replace(found, vocabulary=classes)
    except config_lib.ConfigError as e:
      # A run's keys; the flags here have the names of all but one.
      text = str(e).replace('config.data.path', '--from')
      text = text.replace('config.data.', '--')
      raise config_lib.ConfigError(text) from e
    if whole:
      found = dataclasses.replace(found, root=root, name=root)
    if not found.files:
      raise config_lib.ConfigError(f'{found.name} has no files')
    if listings and found.vocabulary != listings[0].vocabulary:
      raise config_lib.ConfigError(
        f'{found.name} has other classes than {listings[0].name}: give them '
        'by --lists'
      )
    listings.append(found)
  for name in listings[0].vocabulary.names:
    if not name.isprintable():  # nor are bytes that are no UTF-8
      raise config_lib.ConfigError(
        f'{flags.source}: class {ascii(name)} has a name that cannot be stored'
      )
  return names, listings


def _has_splits(root):
  return os.path.isdir(root) and bool(image_folder.split_folders(root))


def _digest_of_files(names, listings):
  classes = listings[0].vocabulary
  digest = hashlib.sha256()
  for item in (
    _VERSION, names, classes.names, classes.adjectives, classes.nouns,
    *((os.path.abspath(f.root), f.files, f.labels.tolist()) for f in listings),
  ):  # fmt: skip
    digest.update(json.dumps(item).encode() + b'\n')
  return digest.hexdigest()


def _digest_of_findings(splits):
  """Of all that decides, with the options, what the set holds."""
  digest = hashlib.sha256()
  for split in splits:
    for data in split.digests:
      digest.update(data.ljust(32, b'\0'))
    digest.update(split.kinds.tobytes() + split.shapes.tobytes())
  return digest.hexdigest()


def _load(name, found, outs):
  """A split from its parts, and the (n, 2) int64 states of its files."""
  rows = [row for out in outs for row in worker_lib.read_part(out)]
  if len(rows) != len(found.files):
    raise config_lib.ConfigError(
      f'{os.path.dirname(outs[0])} has damaged files: delete it'
    )
  kinds = np.array(
    [sum(plan_lib.bit(kind) for kind in row[5]) for row in rows], np.uint32
  )
  split = plan_lib.Split(
    name,
    found,
    sizes=np.array([row[1] for row in rows], np.int64),
    shapes=np.array([row[3:5] for row in rows], np.int32),
    kinds=kinds,
    digests=[bytes.fromhex(row[0]) for row in rows],
    formats=[row[2] for row in rows],
    reasons={i: row[6] for i, row in enumerate(rows) if row[6]},
  )
  return split, np.array([row[7:] for row in rows], np.int64)


def _states(paths):
  return np.array([worker_lib.state(path) for path in paths], np.int64)


def _json(path):
  with open(path) as f:
    return json.load(f)
