"""evaluation: its numbers are scikit-learn's, its files those of the rows."""

import json
import pathlib
import re

import numpy as np
from PIL import Image
import pytest
from scipy import special
from sklearn import metrics

from anp_jax import config as config_lib
from anp_jax.data import vocabulary as vocabulary_lib
from anp_jax.data.sources import label_mapping, source as source_lib
from anp_jax.reporting.analysis import (
  analysis_files,
  analysis_page,
  analysis_results as results_lib,
  figures,
  pictures,
)
from tests import builders

_USE = pathlib.Path(__file__).parents[2] / 'docs' / 'use.md'
ADJECTIVES, NOUNS = ('big', 'old', 'red'), ('cat', 'dog', 'sun', 'tree')
NAMES = tuple(f'{a}_{n}' for a in ADJECTIVES for n in NOUNS)
KNOWN = vocabulary_lib.Vocabulary(NAMES)
COUNT = 400
HELD_OUT = ('big_cat', 'red_tree')


def _saved(lost=3):
  """Scores of a made-up network, and its probabilities.

  The last class has no example, and the one before is never predicted.
  """
  random = np.random.default_rng(0)
  labels = random.integers(0, len(NAMES) - 1, COUNT)
  logits = random.normal(size=(COUNT, len(NAMES)))
  logits[np.arange(COUNT), labels] += 1.5
  logits[:, -2] = -9
  scores = special.softmax(logits, -1)
  saved = {'label': labels.astype(np.int32), 'weight': np.ones(COUNT, np.float32), 'logits': logits}
  for part, ids, k in (('adjective', KNOWN.adjective_ids(), 3), ('noun', KNOWN.noun_ids(), 4)):
    saved[part] = np.log(np.stack([scores[:, ids == i].sum(1) for i in range(k)], 1))
  saved['weight'][:lost] = 0  # files that could not be read
  return saved, scores


@pytest.fixture(scope='module')
def evaluated():
  saved, scores = _saved()
  sizes = np.arange(len(NAMES)) * 10
  return results_lib.Results(KNOWN, saved, sizes), scores


def test_classes_are_scikit_learns(evaluated):
  results, scores = evaluated
  readable = results.readable
  labels, predicted = (results.rows['label'][readable], scores[readable].argmax(1))
  report = metrics.classification_report(
    labels,
    predicted,
    labels=range(len(NAMES)),
    target_names=NAMES,
    output_dict=True,
    zero_division=0,
  )
  for row in results.classes()[:-1]:
    want = report[row['class']]
    # A class that nothing is called has no precision; scikit-learn says 0.
    assert (row['precision'] or 0) == pytest.approx(want['precision'], abs=1e-12)
    assert row['top1'] == pytest.approx(want['recall'])
    assert row['f1'] == pytest.approx(want['f1-score'], abs=1e-12)
    assert row['images'] == want['support']
  last = results.classes()[-1]
  assert (last['images'], last['top1'], last['f1']) == (0, None, None)
  assert last['training_images'] == 110
  assert results.classes()[-2]['precision'] is None
  totals = results.scores()
  want = metrics.balanced_accuracy_score(labels, predicted)
  assert totals['macro_accuracy'] == pytest.approx(want, abs=1e-12)
  part = results.parts[0]
  assert part.hits.mean() == metrics.accuracy_score(labels, predicted)
  for i, row in enumerate(results.classes()[:-1]):
    want = metrics.average_precision_score(labels == i, scores[readable, i])
    assert row['average_precision'] == pytest.approx(want, abs=1e-12)
  want = np.mean([row['average_precision'] for row in results.classes()[:-1]])
  assert totals['mean_average_precision'] == pytest.approx(want, abs=1e-12)
  images = np.array([row['images'] for row in results.classes()])
  top5 = np.array([row['top5'] or 0 for row in results.classes()])
  want = metrics.top_k_accuracy_score(labels, scores[readable], k=5, labels=range(len(NAMES)))
  assert (images * top5).sum() / images.sum() == pytest.approx(want)


def test_confusions_are_scikit_learns(evaluated):
  results, _ = evaluated
  for part in results.parts:
    everything = np.arange(len(part.names))
    want = metrics.confusion_matrix(part.labels, part.predicted, labels=everything)
    np.testing.assert_array_equal(part.matrix(everything), want)
    wrong = want - np.diag(np.diag(want))
    assert sum(n for *_, n in part.confusions) == wrong.sum()
    label, predicted, times = part.confusions[0]
    assert times == wrong.max() == wrong[label, predicted]
    want = metrics.balanced_accuracy_score(part.labels, part.predicted)
    assert part.macro_accuracy == pytest.approx(want, abs=1e-12)
  worst = results.classes()[0]
  wrong = results.parts[0].matrix(np.arange(len(NAMES)))[0]
  wrong[0] = 0
  assert worst['times'] == wrong.max()
  assert wrong[NAMES.index(worst['most_confused_with'])] == wrong.max()


def test_words_of_the_best_pair_are_scikit_learns(evaluated):
  results, scores = evaluated
  labels, predicted = results.parts[0].labels, scores[results.readable].argmax(1)
  totals, tables = results.scores(), results.words()
  for name, plural, ids, words in (
    ('adjective', 'adjectives', KNOWN.adjective_ids(), ADJECTIVES),
    ('noun', 'nouns', KNOWN.noun_ids(), NOUNS),
  ):
    true, best = ids[labels], ids[predicted]
    assert totals[f'{name}_of_pair'] == metrics.accuracy_score(true, best)
    want = metrics.balanced_accuracy_score(true, best)
    assert totals[f'{name}_of_pair_macro'] == pytest.approx(want, abs=1e-12)
    marginal = np.stack([scores[results.readable][:, ids == i].sum(1) for i in range(len(words))])
    assert [row[name] for row in tables[plural]] == list(words)
    for i, row in enumerate(tables[plural]):
      assert row['images'] == (true == i).sum()
      assert row['pairs'] == (ids == i).sum()
      assert row['top1'] == pytest.approx((marginal.argmax(0) == i)[true == i].mean())
      assert row['top1_of_pair'] == pytest.approx((best == i)[true == i].mean())
      want = metrics.average_precision_score(true == i, marginal[i])
      assert row['average_precision'] == pytest.approx(want, abs=1e-12)
  plain = results_lib.Results(KNOWN.with_pairs('no'), results.saved)
  assert plain.words() == {} and len(plain.parts) == 1
  assert not any('adjective' in name for name in plain.scores())


def test_unseen_classes_by_hand():
  saved, scores = _saved(lost=0)
  held_out = (2, 5)
  sizes = np.where(np.isin(np.arange(len(NAMES)), held_out), 0, 9)
  totals = results_lib.Results(KNOWN, saved, sizes).scores()
  assert results_lib.Results(KNOWN, saved, None, held_out).scores() == totals
  labels, predicted = saved['label'], scores.argmax(1)
  is_unseen = (labels == 2) | (labels == 5)
  assert (totals['seen_classes'], totals['unseen_classes']) == (10, 2)
  assert totals['unseen_images'] == is_unseen.sum()
  assert totals['seen_top1'] == (labels == predicted)[~is_unseen].mean()
  assert totals['unseen_top1'] == (labels == predicted)[is_unseen].mean()
  best = np.where(scores[:, 2] > scores[:, 5], 2, 5)
  assert totals['best_unseen'] == (labels == best)[is_unseen].mean()
  best = np.where(np.isin(np.arange(len(NAMES)), held_out), 0, scores).argmax(1)
  assert totals['best_seen'] == (labels == best)[~is_unseen].mean()
  assert 'open_auc' not in totals  # of a head that ranks its classes alone
  # Every class is seen, or has no image: nothing is told of unseen ones.
  assert 'auc' not in results_lib.Results(KNOWN, saved, np.ones(12), ()).scores()
  assert 'auc' not in results_lib.Results(KNOWN, saved, np.arange(12)[::-1], ()).scores()


def test_an_example_that_cannot_be_scored_is_never_right():
  saved, _ = _saved(lost=0)
  saved['logits'][:40] = np.nan
  results = results_lib.Results(KNOWN, saved)
  assert (results.rows['rank'][:40] == len(NAMES)).all()
  assert not results.parts[0].hits[:40].any() and results.parts[0].hits[40:].any()
  assert np.isnan(results.rows['probabilities'][:40]).all()


def test_calibration_error_in_closed_form():
  # Four of 90 %, half right; one of 60 %, right; one of exactly 3/15, wrong.
  confidence = [0.9, 0.9, 0.9, 0.9, 0.6, 0.2]
  hits = np.array([1, 0, 1, 0, 1, 0], bool)
  result = results_lib.calibration(confidence, hits)
  assert result.error == pytest.approx((4 * 0.4 + 0.4 + 0.2) / 6, abs=1e-12)
  # Bins are open below: 0.2 is the end of the third, 0.9 in the fourteenth.
  assert np.flatnonzero(result.counts).tolist() == [2, 8, 13]
  assert result.counts.sum() == 6 and result.accuracies[13] == 0.5
  assert results_lib.calibration([0.3, 1.0], [0, 1]).counts[14] == 1
  certain = results_lib.calibration(np.full(10, 1.0), np.arange(10) < 7)
  assert certain.error == pytest.approx(0.3, abs=1e-12)
  assert np.isnan(results_lib.calibration([], []).error)


def test_words_that_are_confused_stand_side_by_side():
  """The forty of 500 words with the most errors, in their couples."""
  random = np.random.default_rng(0)
  labels = np.repeat(np.arange(500), 10)
  predicted = labels.copy()
  couples = random.permutation(500)[:40].reshape(20, 2)
  for i, (a, b) in enumerate(couples):
    for x, y in ((a, b), (b, a)):
      predicted[np.flatnonzero(labels == x)[: 2 + i % 8]] = y
  part = results_lib.Part(
    'noun', 'nouns', tuple(f'word{i}' for i in range(500)), labels, predicted, np.ones(len(labels))
  )
  order = figures.shown(part).tolist()
  assert sorted(order) == sorted(couples.ravel().tolist())
  for a, b in couples.tolist():
    assert abs(order.index(a) - order.index(b)) == 1
  some = results_lib.Part('noun', 'nouns', part.names[:5], labels[:30], labels[:30], np.ones(30))
  assert figures.shown(some).tolist() == [0, 1, 2]


class _Source(source_lib.Source):
  """Pixels that show their own index, and places that need care."""

  kind = 'pixels'
  name = 'photographs: validation'
  vocabulary = KNOWN

  def __init__(self, labels):
    self._labels = labels

  def __len__(self):
    return len(self._labels)

  def read(self, indices):
    images = [np.full((20, 20, 3), i % 251, np.uint8) for i in indices]
    return images, self._labels[indices]

  def example_name(self, index):
    return f'a, "b"/{index}\udcff.png'


_FIGURES = (
  'calibration class_sizes confused_pairs confusion_adjectives confusion_nouns examples'.split()
)
_WRITTEN = [f'{name}.png' for name in _FIGURES] + [
  *(f'{name}.csv' for name in ('adjectives', 'classes', 'nouns', 'predictions')),
  *('evaluation.md', 'logits.npz', 'scores.json'),
]


@pytest.fixture(scope='module')
def folder(evaluated, tmp_path_factory):
  results, _ = evaluated
  config = builders.load('configs/resnet_anp.py:tiny', {})
  config.data.image_size = config.data.resize = 20
  path = tmp_path_factory.mktemp('evaluation')
  for name in _WRITTEN:  # a stranger's links
    (path / name).symlink_to(path / 'mine')
  (path / 'mine').write_text('mine')
  (path / 'my folder').mkdir()
  (path / 'examples').symlink_to(path / 'my folder')
  place = str(path)
  source = _Source(results.rows['label'])
  facts = {
    'step': 7,
    'data': source.name,
    'damaged': 3,
    'scores': {'examples': 397, 'anp_top1': 0.5},
  }
  evaluation = analysis_files.write(place, config, source, results, facts)
  return place, evaluation


def test_links_are_replaced_and_not_followed(folder):
  path = pathlib.Path(folder[0])
  written = {p.name for p in path.iterdir() if p.name not in ('mine', 'my folder')}
  assert written == {*_WRITTEN, 'examples'}
  assert not any((path / name).is_symlink() for name in written)
  assert (path / 'mine').read_text() == 'mine' and not [*(path / 'my folder').iterdir()]


def test_files_hold_what_the_rows_hold(evaluated, folder):
  results, scores = evaluated
  place, evaluation = folder
  path = pathlib.Path(place)
  lines = builders.rows(path / 'predictions.csv')
  assert len(lines) == COUNT
  for i in (0, 5, COUNT - 1):
    assert lines[i]['index'] == str(i)
    assert lines[i]['file'] == f'a, "b"/{i}\\udcff.png'
  for i in (5, COUNT - 1):
    assert lines[i]['label'] == NAMES[results.rows['label'][i]]
  # It could not be read: the label in its row is that of a stand-in.
  assert lines[0]['predicted'] == lines[0]['label'] == ''
  order = np.argsort(-scores[5])
  assert lines[5]['predicted'] == NAMES[order[0]]
  assert lines[5]['predicted_5'] == NAMES[order[4]]
  assert float(lines[5]['probability']) == pytest.approx(
    scores[5].max(),
    rel=1e-5,  # six digits
  )
  rank = order.tolist().index(results.rows['label'][5]) + 1
  assert lines[5]['rank_of_label'] == str(rank)
  classes = builders.rows(path / 'classes.csv')
  assert [row['class'] for row in classes] == list(NAMES)
  assert classes[0]['noun'] == 'cat' and classes[-1]['top1'] == ''
  # The words' sizes: class i has 10 i training images, of i // 4 and i % 4.
  counts = {'adjectives': [60, 220, 380], 'nouns': [120, 150, 180, 210]}
  documented = re.search(r'nouns.csv` \| for each name: (.*) \|', _USE.read_text())[1].split(';')
  every, of_class, of_word = ({*re.findall(r'`(\w+)`', part)} for part in documented)
  assert {*classes[0]} == every | of_class | {'class'}
  for plural, sizes in counts.items():
    rows = builders.rows(path / f'{plural}.csv')
    assert {*rows[0]} == every | of_word | {plural.removesuffix('s')}
    assert [int(row['training_images']) for row in rows] == sizes
  assert json.loads((path / 'scores.json').read_text()) == evaluation
  page = (path / 'evaluation.md').read_text()
  assert 'Checkpoint of step 7, 397 images; 3 more could not be read' in page
  for file in evaluation['files'].values():
    assert f'({file})' in page and (path / file).exists()


def test_the_interval_of_an_accuracy():
  """Wilson's formula, by hand, of nine hits in ten images: 0.7890 +- 0.1931."""
  rows = dict(analysis_page.lines({'anp_top1': 0.9, 'examples': 10}))
  assert rows['class top-1, 95 % interval'] == '59.6% to 98.2%'


def test_examples_of_somebody_else_stay(evaluated, folder, tmp_path, monkeypatch):
  pictures = folder[1]['examples']
  builders.write_tree(tmp_path / 'examples', {'mine.txt': 'mine'})
  source = _Source(evaluated[0].rows['label'])
  facts = {'step': 7, 'data': '', 'damaged': 0, 'scores': {'examples': 397, 'anp_top1': 0.5}}
  sizes = {'data.image_size': '20', 'data.resize': '20'}
  config = builders.load('configs/resnet_anp.py:tiny', sizes)
  monkeypatch.setattr(analysis_files, '_write_figures', lambda *_: None)
  arguments = str(tmp_path), config, source, evaluated[0], facts
  analysis_files.write(*arguments)
  assert (tmp_path / 'examples' / 'mine.txt').read_text() == 'mine'
  assert len(list((tmp_path / 'examples').iterdir())) == len(pictures) + 1
  # One that was cut short has a page, and no scores.
  (tmp_path / 'scores.json').unlink()
  analysis_files.write(*arguments)
  assert len(list((tmp_path / 'examples').iterdir())) == len(pictures)


def test_figures_are_pictures_of_a_sane_size(folder):
  place, evaluation = folder
  drawn = [f for f in evaluation['files'].values() if f.endswith('.png')]
  assert sorted(drawn) == [f'{name}.png' for name in _FIGURES]
  for file in drawn:
    with Image.open(pathlib.Path(place) / file) as image:
      assert image.format == 'PNG'
      assert 300 <= min(image.size) and max(image.size) <= 3000
      assert len(set(image.convert('L').tobytes())) > 20


def test_examples_are_right_and_wrong_as_the_network_sees_them(evaluated, folder):
  results, scores = evaluated
  place, evaluation = folder
  right = [e for e in evaluation['examples'] if e['right']]
  wrong = [e for e in evaluation['examples'] if not e['right']]
  assert len(right) == len(wrong) == 12
  for example in evaluation['examples']:
    index = int(example['file'].removesuffix('.png'))
    assert (scores[index].argmax() == results.rows['label'][index]) == (example['right'])
    with Image.open(pathlib.Path(place, 'examples', example['file'])) as image:
      assert image.size == (20, 20)
      assert set(np.asarray(image).ravel()) == {index % 251}
  sure = [e['probability'] for e in wrong]
  assert sure == sorted(sure, reverse=True)
  choice = pictures.choose(results)
  label, predicted, times, confused, examples = choice.pairs[0]
  for index in confused:
    assert results.rows['label'][index] == label
    assert scores[index].argmax() == predicted
  assert all(results.rows['label'][i] == predicted for i in examples)
  assert len(confused) == min(times, 5)


def test_labels_are_found_by_the_names_of_classes():
  class Other(_Source):
    name = 'other'
    vocabulary = vocabulary_lib.Vocabulary(('red_sun', 'big_cat'))

    def labels(self):
      return self._labels

  source = Other(np.array([0, 1, 1], np.int32))
  mapped = label_mapping.map_labels(source, KNOWN)
  assert mapped.labels().tolist() == [NAMES.index('red_sun'), 0, 0]
  assert mapped.read(np.array([2, 0]))[1].tolist() == [0, NAMES.index('red_sun')]
  assert (len(mapped), mapped.vocabulary, mapped.name) == (3, KNOWN, 'other')
  assert label_mapping.map_labels(_Source(None), KNOWN).vocabulary is KNOWN
  # The run's classes are pairs, whatever the names alone would tell.
  Other.vocabulary = KNOWN.with_pairs('no')
  assert label_mapping.map_labels(source, KNOWN).vocabulary is KNOWN
  # Classes without names, and a set that lacks the highest numbers.
  Other.vocabulary = vocabulary_lib.Vocabulary(('class0', 'class1'))
  numbered = vocabulary_lib.Vocabulary(tuple(f'class{i:02}' for i in range(12)))
  assert label_mapping.map_labels(source, numbered).labels().tolist() == [0, 1, 1]
  few, Other.vocabulary = Other.vocabulary, numbered
  with pytest.raises(config_lib.ConfigError, match="'class02', which is none of the 2 "):
    label_mapping.map_labels(source, few)
  Other.vocabulary = vocabulary_lib.Vocabulary(('big_cat', 'red_sunn'))
  with pytest.raises(config_lib.ConfigError, match="other has the class 'red_sunn'.*'red_sun'"):
    label_mapping.map_labels(source, KNOWN)
