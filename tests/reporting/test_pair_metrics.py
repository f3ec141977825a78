"""Metrics of pairs against scikit-learn, SciPy and loops over every bias."""

import numpy as np
import pytest
from scipy import special, stats

from anp_jax.data import lexicons, vocabulary as vocabulary_lib
from anp_jax.reporting.analysis import analysis_results, pair_metrics

metrics = pytest.importorskip('sklearn.metrics')

ADJECTIVES, NOUNS = tuple('abcde'), tuple('uvwxyz')
# 17 of the 30 combinations, the last five of them without a training image.
_CODES = np.random.default_rng(8).permutation(30)[:17]
NAMES = tuple(f'{ADJECTIVES[i // 6]}_{NOUNS[i % 6]}' for i in _CODES)
CLASSES = vocabulary_lib.Vocabulary(NAMES, ADJECTIVES, NOUNS)
SIZES = np.array([9] * 12 + [0] * 5)
COUNT = 300


def _saved(rounded):
  """Scores of a factored head; rounded ones have many ties."""
  random = np.random.default_rng(7 + rounded)
  labels = random.integers(0, 17, COUNT)
  codes = _CODES[labels]
  words = {}
  for name, ids, count in ('adjective', codes // 6, 5), ('noun', codes % 6, 6):
    scores = random.normal(size=(COUNT, count))
    scores[np.arange(COUNT), ids] += 1.2
    words[name] = np.round(2 * scores) / 2 if rounded else special.log_softmax(scores, 1)
  logits = words['adjective'][:, _CODES // 6] + words['noun'][:, _CODES % 6]
  return words | {'logits': logits, 'label': labels, 'weight': np.ones(COUNT)}


def _swept(scores, labels, trained, novel):
  """The curve by one answer per image and bias, over a bias on each side of each change."""
  leads = np.unique(scores[:, trained].max(1) - scores[:, novel].max(1))
  biases = [leads[0] - 1, *(leads[1:] + leads[:-1]) / 2, leads[-1] + 1]
  is_seen = np.isin(labels, trained)
  points = []
  for bias in biases:
    shifted = np.full(scores.shape, -np.inf)
    shifted[:, trained] = scores[:, trained]
    shifted[:, novel] = scores[:, novel] + bias
    right = shifted.argmax(1) == labels
    points.append((right[is_seen].mean(), right[~is_seen].mean()))
  return np.array(points).T


def _figures(curve):
  x, y = curve
  harmonic = [stats.hmean(point) if all(point) else 0 for point in zip(x, y)]
  return {
    'best_seen': x.max(),
    'best_unseen': y.max(),
    'harmonic_mean': max(harmonic),
    'auc': metrics.auc(x, y),
  }


@pytest.mark.parametrize('rounded', [False, True])
def test_the_sweep_of_a_bias_is_a_loop_over_biases(rounded):
  saved = _saved(rounded)
  columns = np.arange(12), np.arange(12, 17)
  want = _swept(saved['logits'], saved['label'], *columns)
  curve = pair_metrics.bias_sweep((saved['logits'],), saved['label'], *columns)
  if not rounded:
    assert want.shape[1] == COUNT + 1  # every image changes at a bias of its own
  np.testing.assert_allclose(curve, want, atol=1e-12)
  totals = analysis_results.Results(CLASSES, saved, SIZES, (), True).scores()
  for name, value in _figures(want).items():
    assert 0 < totals[name] < 1
    assert totals[name] == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize('rounded', [False, True])
def test_ranks_are_those_of_a_sort_in_pieces_too(rounded, monkeypatch):
  monkeypatch.setattr(analysis_results, '_CHUNK', 17 * 7)  # pieces of seven images
  saved = _saved(rounded)
  rows = analysis_results.Results(CLASSES, saved, SIZES).rows
  order = np.argsort(-saved['logits'], 1, 'stable')
  np.testing.assert_array_equal(rows['classes'], order[:, :5])
  np.testing.assert_array_equal(rows['rank'], 1 + (order == saved['label'][:, None]).argmax(1))
  logs = special.log_softmax(saved['logits'], 1)
  # float64 sums of 17 terms.
  np.testing.assert_allclose(rows['log_probabilities'], logs, atol=1e-12)
  best = np.exp(np.take_along_axis(logs, order[:, :5], 1))
  np.testing.assert_allclose(rows['probabilities'], best, rtol=1e-12)


@pytest.mark.parametrize('rounded', [False, True])
def test_the_open_world_has_all_combinations(rounded, monkeypatch):
  monkeypatch.setattr(pair_metrics, '_CHUNK', 30 * 7)  # chunks of seven images
  saved = _saved(rounded)
  adjective, noun = saved['adjective'], saved['noun']
  scores = np.stack([adjective[:, i] + noun[:, j] for i in range(5) for j in range(6)], 1)
  unseen_codes = np.setdiff1d(np.arange(30), _CODES[:12])
  totals = analysis_results.Results(CLASSES, saved, SIZES, (), True).scores()
  assert totals['open_pairs'] == 18
  want = _figures(_swept(scores, _CODES[saved['label']], _CODES[:12], unseen_codes))
  assert totals['best_seen'] == pytest.approx(want.pop('best_seen'), abs=1e-12)
  for name, value in want.items():
    assert totals[f'open_{name}'] == pytest.approx(value, abs=1e-12)
  assert totals['open_auc'] < totals['auc']


@pytest.mark.parametrize('rounded', [False, True])
def test_rankings_are_scikit_learns(rounded):
  saved = _saved(rounded)
  labels = np.where(saved['label'] == 4, 5, saved['label'])  # no image of class 4
  labels[:4] = 16, 16, 16, 0
  scores = saved['logits'] if rounded else special.log_softmax(saved['logits'], 1)
  ranking = pair_metrics.ranking(scores, labels)
  for c in range(17):
    if c == 4:
      assert all(np.isnan(values[c]) for values in ranking.values())
      continue
    want = metrics.average_precision_score(labels == c, scores[:, c])
    assert ranking['average_precision'][c] == pytest.approx(want, abs=1e-12)
    first = sorted(range(COUNT), key=lambda i: (-scores[i, c], i))
    for k in (1, 5, 10):
      assert ranking[f'precision_at_{k}'][c] == np.mean([labels[i] == c for i in first[:k]])
  few = pair_metrics.ranking(scores[:4], labels[:4])
  assert few['precision_at_10'][16] == 0.3  # three of ten places


def test_images_that_a_network_is_sure_of_are_ranked():
  """In float32 the probabilities of the class would all be 1."""
  random = np.random.default_rng(3)
  labels = random.integers(0, 3, 60)
  logits = np.zeros((60, 3), np.float32)
  logits[:, 0] = random.uniform(18, 30, 60)
  names = vocabulary_lib.Vocabulary(('a', 'b', 'c'))
  saved = {'logits': logits, 'label': labels, 'weight': np.ones(60)}
  (part,) = analysis_results.Results(names, saved).parts
  want = metrics.average_precision_score(labels == 0, logits[:, 0])
  assert part.ranking['average_precision'][0] == pytest.approx(want, abs=1e-12)


def test_scores_that_are_not_numbers_are_the_lowest():
  saved = _saved(True)
  saved['logits'][50:99] = np.nan  # images that cannot be scored
  labels = saved['label']
  totals = analysis_results.Results(CLASSES, saved, SIZES).scores()
  scores = special.log_softmax(saved['logits'], 1)
  scores[50:99] = -1e9
  want = [metrics.average_precision_score(labels == c, scores[:, c]) for c in range(17)]
  assert totals['mean_average_precision'] == pytest.approx(np.mean(want), abs=1e-12)
  # A network that diverged ranks nothing, and names nothing right.
  for name in ('logits', 'adjective', 'noun'):
    saved[name][:] = np.nan
  totals = analysis_results.Results(CLASSES, saved, SIZES, (), True).scores()
  assert np.isnan([totals['mean_average_precision'], totals['mean_precision_at_5']]).all()
  for prefix in '', 'open_':
    for name in ('best_unseen', 'harmonic_mean', 'auc'):
      assert str(totals[f'{prefix}{name}']) == '0.0'  # and not -0.0


def test_a_large_sweep_has_every_change():
  random = np.random.default_rng(0)
  scores, labels = random.normal(size=(5000, 553)), random.integers(0, 553, 5000)
  scores[np.arange(5000), labels] += 3
  columns = np.arange(500), np.arange(500, 553)
  x, y = pair_metrics.bias_sweep((scores,), labels, *columns)
  assert len(x) == 5001 and x[-1] == y[0] == 0
  # A loop over all of them would take a minute or more.
  for bias in (-1.0, 0.0, 1.0):
    right = (scores + bias * (np.arange(553) >= 500)).argmax(1) == labels
    point = right[labels < 500].mean(), right[labels >= 500].mean()
    assert np.abs(np.stack([x, y], 1) - point).sum(1).min() == 0


def test_sentiment_is_scipys():
  saved = _saved(False)
  saved['logits'][:9] = np.nan  # images that cannot be scored
  values = np.random.default_rng(1).choice([-1.5, -0.5, 0.0, 0.5, 1.5], 17)
  values[:3] = 0, 0.5, -0.5
  table = dict(zip(NAMES[:-2], values)) | {'no_class': 2.0}  # two classes are not in it
  tables = lexicons.Lexicons(sentiments=table).by_class(NAMES)
  totals = analysis_results.Results(CLASSES, saved, lexicon=tables).scores()
  keep = (saved['label'] < 15) & (np.arange(COUNT) >= 9)
  probabilities = special.softmax(saved['logits'][keep][:, :15], 1)
  true = values[saved['label'][keep]]
  for suffix, got in (
    ('', (probabilities * values[:15]).sum(1)),
    ('_of_pair', values[probabilities.argmax(1)]),
  ):
    want = stats.spearmanr(true, got).statistic
    assert totals[f'sentiment_spearman{suffix}'] == pytest.approx(want, abs=1e-12)
    # A right score of 0 has no sign.
    signs = metrics.accuracy_score(np.sign(true[true != 0]), np.sign(got[true != 0]))
    assert totals[f'sentiment_sign{suffix}'] == pytest.approx(signs, abs=1e-12)
  assert totals['sentiment_images'] == keep.sum()
  assert np.isnan(pair_metrics.spearman(np.ones(4), np.arange(4)))
  assert np.isnan(pair_metrics.spearman(np.ones(0), np.ones(0)))


def _emotions(path, header):
  rows = np.random.default_rng(2).dirichlet(np.full(24, 0.3), 16)
  lines = [','.join([name, *map(str, row)]) for name, row in zip(NAMES, rows)]
  path.write_text('\n'.join([','.join(['ANP', *header]), *lines]))
  return rows


def test_emotions_by_family(tmp_path):
  families = 'joy trust fear surprise sadness disgust anger anticipation'.split()
  # Plutchik 1980, strongest first, as MVSO spells them.
  header = (
    'ecstasy joy serenity admiration trust acceptance terror fear apprehension amazement '
    'surprise distraction grief sadness pensiveness loathing disgust boredom rage anger '
    'annoyance vigilance anticipation interest'
  ).split()
  shuffled = np.random.default_rng(4).permutation(24)
  path = tmp_path / 'emotions.csv'
  shares = _emotions(path, [header[i] for i in shuffled])
  sums = np.zeros((16, 8))
  for column, i in enumerate(shuffled):
    sums[:, i // 3] += shares[:, column]
  assert list(lexicons.FAMILIES) == families
  tables = lexicons.read(CLASSES, '', str(path))
  assert len(tables.notes) == 1 and f'{NAMES[16]!r}' in tables.notes[0]
  values = tables.by_class(NAMES)
  np.testing.assert_allclose(values['emotion'][:16], sums, atol=1e-6)  # read as float32
  saved = _saved(False)
  totals = analysis_results.Results(CLASSES, saved, lexicon=values).scores()
  keep = saved['label'] < 16
  probabilities = special.softmax(saved['logits'][keep][:, :16], 1)
  true = sums.argmax(1)[saved['label'][keep]]
  want = metrics.accuracy_score(true, (probabilities @ sums).argmax(1))
  assert totals['emotion_top1'] == pytest.approx(want)
  want = metrics.accuracy_score(true, sums.argmax(1)[probabilities.argmax(1)])
  assert totals['emotion_top1_of_pair'] == pytest.approx(want)
  assert totals['emotion_images'] == keep.sum()


def test_lexicons_that_do_not_fit_are_one_line(tmp_path):
  path = tmp_path / 'emotions.csv'
  _emotions(path, [f'emotion{chr(97 + i)}' for i in range(24)])
  with pytest.raises(ValueError, match="^--emotions: the table lacks 'ecstasy'.*$"):
    lexicons.read(CLASSES, '', str(path)).by_class(NAMES)
  (tmp_path / 'mood.csv').write_text('other_pair,0.5\n')
  with pytest.raises(ValueError, match='mood.csv has none of the 17 classes'):
    lexicons.read(CLASSES, str(tmp_path / 'mood.csv'))
  with pytest.raises(ValueError, match='--sentiment is for adjective_noun pairs'):
    lexicons.read(CLASSES.with_pairs('no'), str(tmp_path / 'mood.csv'))
