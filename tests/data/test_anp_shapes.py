"""Tests of the embedded data set: its scenes and its files."""

import hashlib
import io
import sys

import numpy as np
from PIL import Image
import pytest

from anp_jax.data.sources import anp_shapes, scenes
from tests import builders, launching

# Draws a small version of the set and prints a digest of what it reads back.
_PROGRAM = """
import hashlib, sys
import numpy as np
from anp_jax.data.sources import anp_shapes

anp_shapes.EXAMPLES_PER_CLASS = {'train': 3, 'validation': 2}
digest = hashlib.sha256()
for split in anp_shapes.EXAMPLES_PER_CLASS:
  source = anp_shapes.open_split(split, sys.argv[1])
  images, labels = source.read(np.arange(len(source)))
  digest.update(b''.join(images) + labels.tobytes())
print(digest.hexdigest(), 'tensorflow' in sys.modules)
"""


# The full set takes seventeen seconds of a core's time; a part of it is still
# divided among worker processes.
_COUNTS = {'train': 8, 'validation': 3}


@pytest.fixture(scope='module')
def counts():
  """Scenes of a class: {split: count}, as the set is built in these tests."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(anp_shapes, 'EXAMPLES_PER_CLASS', _COUNTS)
    yield _COUNTS


@pytest.fixture(scope='module')
def splits(counts, tmp_path_factory):
  """The set: {split: (list of JPEG bytes, labels (n,) int32)}."""
  folder = str(tmp_path_factory.mktemp('anp_shapes'))
  sources = {split: anp_shapes.open_split(split, folder) for split in counts}
  return {split: source.read(np.arange(len(source))) for split, source in sources.items()}


def test_render_gives_the_same_bytes_in_another_process():
  jobs = [(0, 0), (1, 0), (0, 1), (len(scenes.CLASS_NAMES) - 1, 2**32 + 7)]
  here = [hashlib.sha256(scenes.render(*job)).hexdigest() for job in jobs]
  assert len(set(here)) == len(jobs)
  there = launching.python(
    '-c',
    'import hashlib, sys\n'
    'sys.path.insert(0, "anp_jax/data/sources")\n'
    'import scenes\n'
    f'for job in {jobs}:\n'
    '  print(hashlib.sha256(scenes.render(*job)).hexdigest())\n'
    'print(len({"tensorflow", "jax", "absl", "scipy"} & set(sys.modules)))\n',
  )
  assert there.stdout.split() == [*here, '0'], there.stderr  # renderers have to start fast


def test_images_are_small_rgb_jpegs_of_balanced_classes(splits, counts):
  for split, (images, labels) in splits.items():
    np.testing.assert_array_equal(np.bincount(labels), [counts[split]] * len(scenes.CLASS_NAMES))
    for data in images[:100]:
      image = Image.open(io.BytesIO(data))
      assert image.format == 'JPEG'
      assert image.mode == 'RGB'
      assert image.size == (scenes.IMAGE_SIZE, scenes.IMAGE_SIZE)


def test_names_and_splits(counts, tmp_path):
  del counts
  source = anp_shapes.open_split('val', str(tmp_path))
  assert source.vocabulary.names == scenes.CLASS_NAMES
  labels = source.labels()
  assert len(np.unique(labels[: len(labels) // 2])) > 30  # no half lacks half of the classes
  name = source.listing()[0]
  assert name.startswith(scenes.CLASS_NAMES[labels[0]]) and name in source.example_name(0)
  builders.assert_refused(
    "no split 'tset' .it has train, validation", anp_shapes.open_split, 'tset', str(tmp_path)
  )


def test_no_scene_is_in_both_splits(splits):
  seeds = {
    split: {anp_shapes.scene_seed(split, i) for i in range(count)}
    for split, count in {'train': 160, 'validation': 30}.items()
  }
  assert not seeds['train'] & seeds['validation']
  train, validation = splits['train'][0], splits['validation'][0]
  assert len(set(train + validation)) == len(train) + len(validation)


def test_stored_bytes_are_the_rendered_ones(splits, counts):
  images, labels = splits['validation']
  for class_id in (0, 17):
    stored = {i for i, label in zip(images, labels) if label == class_id}
    assert stored == {
      scenes.render(class_id, anp_shapes.scene_seed('validation', index))
      for index in range(counts['validation'])
    }


@pytest.mark.slow
def test_two_builds_at_once_read_the_same(tmp_path):
  """From standard input, where worker processes find no program."""
  folders = (tmp_path, tmp_path, tmp_path / 'other')
  builds = [launching.start('-', folder) for folder in folders]
  for build in builds:
    build.stdin.write(_PROGRAM)
    build.stdin.close()
  lines = {build.stdout.read() for build in builds}
  assert not [build.stderr.read() for build in builds if build.wait()]
  assert len(lines) == 1 and lines.pop().endswith(' False\n')
  assert len(list((tmp_path / 'tables').glob('*.arrow'))) == 2


def test_without_worker_processes(monkeypatch):
  monkeypatch.setattr(sys, 'executable', '/nonexistent/python')
  jobs = [(3, 1), (0, 2), (5, 0)]
  assert anp_shapes._render(jobs) == [scenes.render(*job) for job in jobs]
