"""Tests of the embedded data set: its scenes, its files, its difficulty."""

import collections
import hashlib
import io
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
from PIL import Image
import pytest
from sklearn import linear_model, pipeline, preprocessing
import tensorflow_datasets as tfds

from anp_jax.data.sources import anp_shapes, scenes

_ROOT = pathlib.Path(__file__).resolve().parents[2]

# Together they build a small version of the set and print a digest of what they
# read back.
_BUILD = """
import hashlib
import sys
import tensorflow_datasets as tfds
from anp_jax.data.sources import anp_shapes

anp_shapes.EXAMPLES_PER_CLASS = {'train': 3, 'validation': 2}
"""
_READ = """
builder = anp_shapes.prepare(sys.argv[1])
digest = hashlib.sha256()
for split in ('train', 'validation'):
  source = builder.as_data_source(
      split=split, decoders={'image': tfds.decode.SkipDecoding()}
  )
  for example in source:
    digest.update(example['image'] + bytes([example['label']]))
print(digest.hexdigest())
"""
_KILL_WHILE_WRITING = """
import itertools, os, signal
generate = anp_shapes.AnpShapes._generate_examples
def die_midway(self, split):
  yield from itertools.islice(generate(self, split), 20)
  os.kill(os.getpid(), signal.SIGKILL)
anp_shapes.AnpShapes._generate_examples = die_midway
"""
_KILL_BEFORE_RENAME = """
import os, signal
def die(*args):
  os.kill(os.getpid(), signal.SIGKILL)
anp_shapes.os.rename = die
"""


# The full set takes a quick run seventeen seconds of a core's time; a part of
# it is still divided among worker processes.
_PART = {'train': 8, 'validation': 3}
_SIZES = [
  pytest.param(_PART, id='part'),
  pytest.param(anp_shapes.EXAMPLES_PER_CLASS, id='all', marks=pytest.mark.soak),
]


# What is said of its difficulty is said of the full set.
_ALL = pytest.mark.parametrize('counts', _SIZES[1:], indirect=True)


@pytest.fixture(scope='module', params=_SIZES)
def counts(request):
  """Scenes of a class: {split: count}, as the set is built in these tests."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(anp_shapes, 'EXAMPLES_PER_CLASS', request.param)
    yield request.param


@pytest.fixture(scope='module')
def data_dir(counts, tmp_path_factory):
  return tmp_path_factory.mktemp('anp_shapes')


@pytest.fixture(scope='module')
def splits(data_dir):
  """The set: {split: (list of JPEG bytes, labels (n,) int64)}."""
  builder = anp_shapes.prepare(str(data_dir))
  result = {}
  for split in ('train', 'validation'):
    source = builder.as_data_source(split=split, decoders={'image': tfds.decode.SkipDecoding()})
    examples = list(source)
    labels = np.array([example['label'] for example in examples])
    result[split] = [example['image'] for example in examples], labels
  return result


@pytest.fixture(scope='module')
def pixels(splits):
  """Decoded: {split: (images (n, size, size, 3) uint8, labels (n,))}."""
  return {
    split: (np.stack([_decode(image) for image in images]), labels)
    for split, (images, labels) in splits.items()
  }


@pytest.fixture(scope='session')
def small_digest(tmp_path_factory):
  """The digest that every undisturbed small build has to print."""
  return _python(_BUILD + _READ, tmp_path_factory.mktemp('small'))


def test_names_form_a_grid_with_holes():
  names = scenes.CLASS_NAMES
  assert len(set(names)) == len(names)
  pairs = [tuple(name.split('_')) for name in names]
  for pair in pairs:
    assert len(pair) == 2
    assert all(word.isascii() and word.islower() for word in pair)
  adjectives = collections.Counter(adjective for adjective, _ in pairs)
  nouns = collections.Counter(noun for _, noun in pairs)
  assert min(adjectives.values()) >= 3
  assert min(nouns.values()) >= 3
  assert 55 <= len(pairs) < len(adjectives) * len(nouns)
  assert not set(adjectives) & set(nouns)


def test_render_gives_the_same_bytes_in_another_process():
  jobs = [(0, 0), (1, 0), (0, 1), (len(scenes.CLASS_NAMES) - 1, 2**32 + 7)]
  here = [hashlib.sha256(scenes.render(*job)).hexdigest() for job in jobs]
  assert len(set(here)) == len(jobs)
  there = _python(
    'import hashlib\n'
    'from anp_jax.data.sources import scenes\n'
    f'for job in {jobs}:\n'
    '  print(hashlib.sha256(scenes.render(*job)).hexdigest())\n'
  )
  assert there.split() == here


@pytest.mark.parametrize('class_id', [-1, len(scenes.CLASS_NAMES)])
def test_render_refuses_an_unknown_class(class_id):
  with pytest.raises(IndexError):
    scenes.render(class_id, 0)


def test_renderer_imports_little():
  heavy = _python(
    'import sys\n'
    'sys.path.insert(0, "anp_jax/data/sources")\n'
    'import scenes\n'
    'print({"tensorflow", "jax", "absl", "scipy"} & set(sys.modules))\n'
  )
  assert heavy == 'set()'


def test_images_are_small_rgb_jpegs(splits):
  for images, _ in splits.values():
    for data in images[:100]:
      image = Image.open(io.BytesIO(data))
      assert image.format == 'JPEG'
      assert image.mode == 'RGB'
      assert image.size == (scenes.IMAGE_SIZE, scenes.IMAGE_SIZE)


def test_splits_are_balanced(splits, counts):
  for split, (_, labels) in splits.items():
    np.testing.assert_array_equal(np.bincount(labels), [counts[split]] * len(scenes.CLASS_NAMES))


def test_names_are_stored(splits, data_dir):
  del splits  # built
  builder = anp_shapes.prepare(str(data_dir))
  assert tuple(builder.info.features['label'].names) == scenes.CLASS_NAMES


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
@pytest.mark.parametrize('kill', [_KILL_WHILE_WRITING, _KILL_BEFORE_RENAME])
def test_a_killed_build_leaves_nothing_finished(tmp_path, small_digest, kill):
  killed = _start(_BUILD + kill + _READ, tmp_path)
  output, _ = killed.communicate(timeout=60)
  assert killed.returncode == -signal.SIGKILL
  assert not output
  assert not (tmp_path / 'anp_shapes' / '1.0.0').exists()
  assert _leftovers(tmp_path)  # it was killed in the midst of its work

  assert _python(_BUILD + _READ, tmp_path) == small_digest
  assert not _leftovers(tmp_path)


@pytest.mark.slow
def test_two_builds_at_once(tmp_path, small_digest):
  builds = [_start(_BUILD + _READ, tmp_path) for _ in range(2)]
  for build in builds:
    output, error = build.communicate(timeout=60)
    assert build.returncode == 0, error
    assert output.strip() == small_digest
  assert not _leftovers(tmp_path)


@pytest.mark.slow
def test_two_hosts_at_once(tmp_path, small_digest):
  """Without a common lock both build, and the second rename loses."""
  unlocked = """
import fcntl, os, time
def refuse(*args):
  raise OSError('no locks here')
fcntl.flock = refuse
rename = os.rename
def rename_together(source, target):
  open(os.path.join(sys.argv[1], f'ready{os.getpid()}'), 'w').close()
  while sum(name.startswith('ready') for name in os.listdir(sys.argv[1])) < 2:
    time.sleep(0.01)
  rename(source, target)
anp_shapes.os.rename = rename_together
"""
  builds = [_start(_BUILD + unlocked + _READ, tmp_path) for _ in range(2)]
  for build in builds:
    output, error = build.communicate(timeout=60)
    assert build.returncode == 0, error
    assert output.strip() == small_digest
  assert not _leftovers(tmp_path)


@pytest.mark.slow
def test_program_from_standard_input(tmp_path, small_digest):
  result = subprocess.run(
    [sys.executable, '-', str(tmp_path)],
    input=_BUILD + _READ,
    capture_output=True,
    text=True,
    env=_environment(),
    check=True,
  )
  assert result.stdout.strip() == small_digest
  assert 'Traceback' not in result.stderr


@pytest.mark.slow
def test_tensorflow_is_not_imported(tmp_path):
  program = _BUILD + _READ + "print('tensorflow' in sys.modules)"
  assert _python(program, tmp_path).split()[-1] == 'False'


def test_without_worker_processes(monkeypatch):
  monkeypatch.setattr(sys, 'executable', '/nonexistent/python')
  jobs = [(3, 1), (0, 2), (5, 0)]
  assert anp_shapes._render(jobs) == [scenes.render(*job) for job in jobs]


def test_something_else_in_its_place(tmp_path, monkeypatch):
  monkeypatch.setattr(anp_shapes, 'EXAMPLES_PER_CLASS', {'train': 1, 'validation': 1})
  place = tmp_path / 'anp_shapes' / '1.0.0'
  place.mkdir(parents=True)
  (place / 'notes.txt').write_text('mine')
  with pytest.raises(FileExistsError, match='not a finished anp_shapes'):
    anp_shapes.prepare(str(tmp_path))
  assert (place / 'notes.txt').read_text() == 'mine'


@_ALL
def test_linear_classifier_on_pixels_stays_poor(pixels):
  def features(images):
    small = images.reshape(len(images), 24, 3, 24, 3, 3).mean((2, 4))
    return small.reshape(len(images), -1)

  accuracy = _accuracy(pixels, features, linear_model.RidgeClassifier(alpha=1000))
  assert 2 / len(scenes.CLASS_NAMES) < accuracy <= 0.35


@pytest.mark.filterwarnings('ignore:lbfgs failed to converge')
@_ALL
def test_logistic_regression_on_pixels_stays_poor(pixels):
  def features(images):
    small = images.reshape(len(images), 12, 6, 12, 6, 3).mean((2, 4))
    return small.reshape(len(images), -1)

  accuracy = _accuracy(
    pixels, features, linear_model.LogisticRegression(C=0.01, max_iter=60, tol=1e-3)
  )
  assert 2 / len(scenes.CLASS_NAMES) < accuracy <= 0.35


@_ALL
def test_linear_classifier_on_colours_stays_poor(pixels):
  def features(images):
    """Square roots of the frequencies of 6 x 6 x 6 colours."""
    levels = images.astype(np.int64) * 6 // 256
    colours = levels @ (36, 6, 1)
    counts = [np.bincount(c.ravel(), minlength=216) for c in colours]
    return np.sqrt(counts)

  accuracy = _accuracy(pixels, features, linear_model.RidgeClassifier(alpha=3))
  assert 2 / len(scenes.CLASS_NAMES) < accuracy <= 0.35


def _accuracy(pixels, features, classifier):
  """Validation accuracy of a classifier on standardised features."""
  model = pipeline.make_pipeline(preprocessing.StandardScaler(), classifier)
  images, labels = pixels['train']
  model.fit(features(images), labels)
  images, labels = pixels['validation']
  return model.score(features(images), labels)


def _decode(data):
  return np.asarray(Image.open(io.BytesIO(data)))


def _leftovers(directory):
  return [p for p in directory.iterdir() if p.is_dir() and p.name[0] == '.']


def _environment():
  path = os.pathsep.join([str(_ROOT), os.environ.get('PYTHONPATH', '')])
  return os.environ | {'PYTHONPATH': path.rstrip(os.pathsep)}


def _start(program, *arguments):
  return subprocess.Popen(
    [sys.executable, '-c', program, *map(str, arguments)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=_ROOT,
    env=_environment(),
  )


def _python(program, *arguments):
  """Runs a program to its end and returns what it printed."""
  process = _start(program, *arguments)
  output, error = process.communicate(timeout=60)
  assert process.returncode == 0, error
  return output.strip()
