"""Tests of lists, tar shards and sets of Hugging Face: the batches of a run."""

import itertools

import numpy as np
import pytest

from anp_jax.data import sources
from anp_jax.data.input import batch_plan, pipeline
from tests import builders, image_sources, listed_sets

_BATCH, _COUNT, _DAMAGED = 8, 21, 5
_CLASSES = ('big_dog', 'old_cat', 'old_dog')


def _images():
  """Names, bytes and labels, in the order of a tree of class folders."""
  images = []
  for i in range(_COUNT):
    data = builders.encode_image(image_sources.pixels(40, 50, i), 'JPEG')
    if i == _DAMAGED:
      data = data[: len(data) // 2]
    images.append((f'{i:03}', data, i * len(_CLASSES) // _COUNT))
  return images


def _folder(root):
  files = {f'train/{_CLASSES[label]}/{name}.jpg': data for name, data, label in _images()}
  files['validation/old_dog/x.jpg'] = _images()[0][1]
  builders.write_tree(root, files)
  return 'folder', root


def _tar(root):
  for i, shard in enumerate((_images()[:10], _images()[10:])):
    members = {}
    for name, data, label in shard:
      members[f'{name}.jpg'] = data
      members[f'{name}.cls'] = _CLASSES[label].encode()
    listed_sets.write_tar(root / f'train-{i:06}.tar', members)
  return 'tar:{split}-{000000..000001}.tar', root


def _hf(root):
  images = [{'bytes': data, 'path': None} for _, data, _ in _images()]
  columns = {'image': images, 'label': [label for _, _, label in _images()]}
  label = {'_type': 'ClassLabel', 'names': list(_CLASSES)}
  features = {'image': listed_sets.IMAGE, 'label': label}
  table = listed_sets.hf_table(columns, features)
  listed_sets.save_to_disk(root, {'train': table}, rows=4)
  return f'hf:{root.name}', root.parent


def _list(root):
  _folder(root / 'images')
  lines = ['path,label,split']
  for name, _, label in _images():
    path = f'train/{_CLASSES[label]}/{name}.jpg'
    lines.append(f'{path},{_CLASSES[label]},train')
  (root / 'list.csv').write_text('\n'.join(lines))
  return f'list:{root}/list.csv', root / 'images'


def _open(config, make, root):
  config.data.source, path = make(root)
  config.data.path, config.data.dir = str(path), str(root / 'data')
  return sources.open_source(config, training=True)


def _batches(config, source, count, start=0):
  plan = batch_plan.BatchPlan(config, len(source), _BATCH, np.arange(_BATCH), True, start)
  stream = pipeline.batches(source, plan)
  return list(itertools.islice(stream, count))


def _assert_same(batches, want):
  assert len(batches) == len(want)
  for batch, other in zip(batches, want):
    for name in other:
      np.testing.assert_array_equal(batch[name], other[name], name)


@pytest.mark.parametrize('make', [_tar, _hf, _list])
def test_batches_are_those_of_a_tree(make, tmp_path, config, caplog):
  """Pixels, labels and weights, also where an image is damaged."""
  tree = _open(config, _folder, tmp_path / 'tree')
  want = _batches(config, tree, 6)
  replaced = sum(int((batch['weight'] == 0).sum()) for batch in want)
  assert 1 <= replaced <= 4  # 48 rows of 21 images
  caplog.clear()
  source = _open(config, make, tmp_path / 'set')
  assert source.vocabulary == tree.vocabulary
  assert sources.fingerprint(source) == sources.fingerprint(tree)
  _assert_same(_batches(config, source, 6), want)
  (line,) = [r.getMessage() for r in caplog.records if 'cannot be used' in r.getMessage()]
  assert source.example_name(_DAMAGED) in line
  # A run that resumes at a step reads the same bytes.
  again = _open(config, lambda root: _again(config), tmp_path / 'set')
  _assert_same(_batches(config, again, 3, start=3), want[3:])


def _again(config):
  return config.data.source, config.data.path


@pytest.mark.parametrize('make', [_tar, _hf, _list])
def test_classes_are_held_out_and_cut(make, tmp_path, config):
  config.data.pairs, config.data.cache = 'yes', 'encoded'
  config.data.held_out = ('old_dog',)
  source = _open(config, make, tmp_path / 'set')
  assert np.bincount(source.labels()).tolist() == [7, 7]
  config.data.held_out, config.data.imbalance = (), 7.0
  source = sources.open_source(config, training=True)
  # 7, and 7 over the root of 7, and 1.
  assert np.bincount(source.labels()).tolist() == [7, 2, 1]
