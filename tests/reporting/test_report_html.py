"""report/index.html: one file, no script, and no user's text as markup."""

import base64
import io
import json
import os
import re
import types

import jax
from PIL import Image
import pytest

from anp_jax import config as config_lib
from anp_jax.checkpoint import run_dir
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.reporting import run_page, summary
from anp_jax.reporting.analysis import analysis_page
from anp_jax.reporting.run_page import curves, html as html_lib
from anp_jax.tools.compare import runs
from tests import builders, html_pages

_EVIL = '<script>alert("x")</script>&\udcff'
_CONFIG = f'data.path = {_EVIL!r}\nseed = 0\n'


def _png(path, side):
  image = builders.encode_image(builders.random_pixels(side, side))
  builders.write_tree(path.parent, {path.name: image})


def _evaluation(folder):
  """Makes the folder that `analysis.files` writes."""
  _png(folder / 'confusion_nouns.png', 50)
  _png(folder / 'confused_pairs.png', 400)  # noise: above the bound for PNG
  for i, side in enumerate((16, 200)):
    _png(folder / 'examples' / f'{i}.png', side)
  evaluation = {
    'step': 40,
    'data': f'{_EVIL}: validation',
    'damaged': 0,
    'scores': {'examples': 1234, 'anp_top1': 0.25, 'macro_accuracy': 0.125, 'ece': None},
    'files': {'pairs': 'confused_pairs.png', 'confusion_nouns': 'confusion_nouns.png'},
    'confusions': [[_EVIL, 'red_car', 9]],
    'examples': [
      {
        'file': f'{i}.png',
        'where': f'/x/{_EVIL}.jpg',
        'label': _EVIL,
        'predicted': 'red_car',
        'probability': 0.875,
        'right': not i,
      }
      for i in range(2)
    ],
  }
  (folder / 'scores.json').write_text(json.dumps(evaluation))


_START = {
  'kind': 'run',
  'step': 0,
  'time': 1.7e9,
  'command': 'python main.py --a=b',
  'data': 'folder photos',
  'training_images': 1234,
  'validation_images': 56,
  'classes': '4 classes of 2 adjectives and 3 nouns',
}


def _lines(workdir):
  def train(step, loss, **more):
    return {'kind': 'train', 'step': step, 'epoch': step / 20, 'loss': loss, 'seconds': 100, **more}

  def pause(step, what, seconds):
    return {'kind': 'time', 'step': step, 'what': what, 'seconds': seconds}

  lines = [
    pause(0, 'start', 10),
    pause(0, 'compiling', 20),
    train(20, 2.0, input_wait=0.2, images_per_second=50.0, learning_rate=0.1),
    pause(20, 'evaluating', 30),
    {'kind': 'validation', 'step': 20, 'epoch': 1, 'loss': 1.5, 'anp_top1': 0.5},
    train(40, 1.0, input_wait=0.0, images_per_second=60.0, learning_rate=0.05),
    pause(40, 'evaluating', 40),
  ]
  workdir.mkdir(parents=True)
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (workdir / 'metrics.jsonl').write_text(text)


@pytest.fixture(scope='module', autouse=True)
def quick_compiles():
  """Figures are drawn."""


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  place = tmp_path_factory.mktemp('runs') / 'a<b>&c'
  _lines(place)
  _evaluation(place / 'evaluation' / '40-validation')
  run_page.write(str(place), _CONFIG, {'parameters': 12}, {'devices': '8 x <cpu>'})
  return place


@pytest.fixture(scope='module')
def page(workdir):
  return html_pages.parsed(workdir / 'report' / 'index.html')


def test_links_lead_to_places_of_the_page(page):
  ids = {attributes.get('id') for _, attributes in page.tags}
  links = {a['href'][1:] for name, a in page.tags if name == 'a'}
  assert links <= ids and len(links) == 8


def test_users_texts_are_texts(workdir, page):
  text = ''.join(page.text)
  # Half of a character becomes a question mark.
  assert text.count(_EVIL.replace('\udcff', '?')) >= 4
  assert 'a<b>&c' in text and '8 x <cpu>' in text
  raw = (workdir / 'report' / 'index.html').read_text()
  assert '<script' not in raw and '<cpu>' not in raw


def test_what_a_person_looks_for_is_there(page):
  text = ' '.join(page.text)
  words = (
    'best validation|50.0%|images/s (median)|55|macro accuracy|12.5%|1,234 images|'
    'checkpoint of step 40|predicted red_car|count|88%|seed = 0|parameters'
  )
  assert [word for word in words.split('|') if word not in text] == []
  assert 'calibration error' not in text  # which is not known
  names = [name for name, _ in page.tags]
  assert 'details' in names
  sizes = []
  for name, attributes in page.tags:
    if name == 'img':
      data = base64.b64decode(attributes['src'].partition(',')[2])
      with Image.open(io.BytesIO(data)) as image:
        sizes.append((image.format, *image.size))
  # Curves; two figures, the large one as JPEG; two thumbnails.
  assert sizes[0][0] == 'PNG' and sizes[0][1] > 1000
  assert sorted(sizes[1:]) == [
    ('JPEG', 200, 200),
    ('JPEG', 400, 400),
    ('PNG', 16, 16),
    ('PNG', 50, 50),
  ]


def test_the_bar_says_where_the_time_went(page):
  # 300 s: 180 of steps, 20 of waiting for input, and 100 of pauses.
  shares = {}
  for _, attributes in page.tags:
    share = re.match(r'flex: ([\d.]+);', attributes.get('style') or '')
    if share:
      what = re.match(r'(\D+) ', attributes['title'])[1]
      shares[what] = float(share[1])
  assert shares == {
    'start': 3.333,
    'compiling': 6.667,
    'steps': 60,
    'waiting for input': 6.667,
    'evaluating': 23.333,
  }
  assert '5 min 00 s in all.' in page.text


def test_a_later_evaluation_takes_the_place_of_the_first(workdir, tmp_path):
  folder = tmp_path / 'other'
  _evaluation(folder)
  evaluation = json.loads((folder / 'scores.json').read_text())
  evaluation['data'] = 'another set'
  (folder / 'scores.json').write_text(json.dumps(evaluation))
  before = (workdir / 'report' / 'index.html').read_text()
  assert 'another set' not in before and 'id="evaluation"' in before
  assert run_page.rewrite(str(workdir), str(folder))
  after = (workdir / 'report' / 'index.html').read_text()
  for words in ('another set: 1,234 images, checkpoint of step 40.', '8 x &lt;cpu&gt;'):
    assert words in after
  # All else stays.
  for name in ('scores', 'run', 'time', 'hardware', 'config'):
    assert _section(before, name) == _section(after, name)


def _section(text, name):
  return re.search(rf'<section id="{name}">.*?</section>', text, re.DOTALL)[0]


def test_what_was_trained_on_what_when_and_how(tmp_path, no_figure):
  place = tmp_path / 'run'
  _lines(place)
  path = place / 'metrics.jsonl'
  start = _START
  again = start | {'step': 20, 'time': 1.7e9 + 60, 'command': 'anp-train <i>'}
  end = {'kind': 'train', 'step': 60, 'epoch': 3, 'time': 1.7e9 + 3600}
  first, *later = (json.dumps(line) + '\n' for line in (start, again, end))
  path.write_text(''.join([first, path.read_text(), *later]))
  run_page.write(str(place), _CONFIG, {'network': 'resnet'})
  page = (place / 'report' / 'index.html').read_text()
  rows = re.findall('<tr><th>(.*?)</th><td>(.*?)</td></tr>', _section(page, 'run'))
  assert dict(rows) == {
    'trained on': 'folder photos',
    'images': '1,234 for training, 56 for validation',
    'classes': '4 classes of 2 adjectives and 3 nouns',
    'started': '2023-11-14 22:13:20 UTC',
    'resumed': '1 x',
    'last step': '2023-11-14 23:13:20 UTC',
    'command': 'anp-train &lt;i&gt;',
    'network': 'resnet',
  }
  assert 'training time' in _section(page, 'time')


def test_a_page_in_the_dark_and_on_a_telephone(workdir, page):
  """Drawings change their colours, photographs do not; what scrolls says so."""
  drawn = [attributes.get('class') for name, attributes in page.tags if name == 'figure']
  assert drawn == ['drawn', 'drawn', None]  # curves, confusion; photographs
  text = (workdir / 'report' / 'index.html').read_text()
  assert 'figure.drawn img { filter: invert' in text
  assert 'background-attachment: local' in text and '← scroll →' in text


def test_a_run_that_goes_on_has_no_page_and_one_without_an_evaluation_has(tmp_path, no_figure):
  place = tmp_path / 'run'
  _lines(place)
  assert not run_page.rewrite(str(place), '') and not run_page.exists(str(place))
  run_page.write(str(place), _CONFIG, {})
  assert run_page.exists(str(place))
  parsed = html_pages.parsed(place / 'report' / 'index.html')
  assert 'Evaluation' not in parsed.text and 'Scores' in parsed.text
  assert 'img' not in [name for name, _ in parsed.tags]


def test_the_newest_evaluation_is_shown(tmp_path, monkeypatch):
  assert html_lib.newest_evaluation(str(tmp_path)) == ''
  (tmp_path / 'scores.json').write_text('{"scores": {}}')
  monkeypatch.chdir(tmp_path)  # another's scores are here
  assert analysis_page.load('') == {}

  for i, name in enumerate(('b', 'a')):
    _evaluation(tmp_path / 'evaluation' / name)
    os.utime(tmp_path / 'evaluation' / name / 'scores.json', (i, i))
  (tmp_path / 'evaluation' / 'torn').mkdir()
  newest = html_lib.newest_evaluation(str(tmp_path))
  assert newest == str(tmp_path / 'evaluation' / 'a')


def test_what_is_torn_or_gone_costs_no_report(tmp_path, no_figure):
  place = tmp_path / 'run'
  _lines(place)
  folder = place / 'evaluation' / '40-validation'
  _evaluation(folder)
  (folder / 'examples' / '1.png').unlink()
  run_page.write(str(place), _CONFIG, {})
  parsed = html_pages.parsed(place / 'report' / 'index.html')
  titles = [a['alt'] for tag, a in parsed.tags if tag == 'img']
  assert len([t for t in titles if t.startswith('<script>')]) == 1  # of two
  (folder / 'scores.json').write_text('{"step": 4')
  run_page.write(str(place), _CONFIG, {})
  parsed = html_pages.parsed(place / 'report' / 'index.html')
  assert 'Evaluation' not in parsed.text and 'Scores' in parsed.text


def test_a_page_shows_no_file_but_the_runs_own_pictures(tmp_path, no_figure):
  place, outside = tmp_path / 'run', tmp_path / 'outside.png'
  folder = place / 'evaluation' / '40-validation'
  _lines(place)
  _evaluation(folder)
  _png(outside, 16)
  (folder / 'text.png').write_text('a secret')
  (folder / 'link.png').symlink_to(outside)
  (folder / 'torn.png').write_bytes((folder / 'confused_pairs.png').read_bytes()[:-999])
  (folder / 'big.png').write_bytes(b'%!PS-Adobe-3.0 EPSF-3.0\n' + bytes(400_000))
  os.mkfifo(folder / 'pipe.png')
  scores = json.loads((folder / 'scores.json').read_text())
  (example, _) = scores['examples']
  for file in (*'text link torn big pipe none ../../../outside'.split(), outside.with_suffix('')):
    scores['files'] = {'calibration': f'{file}.png'}
    scores['examples'] = [example | {'file': f'../{file}.png'}]
    (folder / 'scores.json').write_text(json.dumps(scores))
    run_page.write(str(place), _CONFIG, {})
    parsed = html_pages.parsed(place / 'report' / 'index.html')
    assert 'img' not in [name for name, _ in parsed.tags], file
  scores['files'] = {'calibration': 'confusion_nouns.png'}
  (folder / 'scores.json').write_text(json.dumps(scores))
  run_page.write(str(place), _CONFIG, {})
  tags = html_pages.parsed(place / 'report' / 'index.html').tags
  assert [name for name, _ in tags].count('img') == 1


# A line of each kind, as a run writes it.
_RECORDS = [
  _START,
  {'kind': 'time', 'step': 0, 'what': 'compiling', 'seconds': 2.5},
  {'kind': 'change', 'step': 9, 'key': 'duration', 'old': '1 epochs', 'new': '2 epochs'},
  {'kind': 'restart', 'step': 9, 'lost': ['x'], 'processes': 2, 'seconds': 1.5, 'repeated': 1},
  {'kind': 'validation', 'step': 20, 'time': 1.7e9, 'epoch': 1.0, 'loss': 1.5, 'anp_top1': 0.5},
  {
    **{'kind': 'train', 'step': 20, 'time': 1.7e9, 'epoch': 1.0, 'loss': 1.5, 'seconds': 9.5},
    **{'images_per_second': 50.0, 'input_wait': 0.5, 'mfu': 0.5, 'learning_rate': 0.1},
  },
  {'kind': 'result', 'step': 20, 'best': {'loss': 1.5}},
]
_FACTS = {'config': 'seed = 0', 'summary': [['network', 'lenet']], 'hardware': [['cores', '2']]}
_ODD = None, 'x', 0, 10**400, [1]


@pytest.mark.parametrize('value', _ODD, ids=range(len(_ODD)))
def test_no_record_of_other_types_stops_a_reader(value, tmp_path):
  config = config_lib.flat(builders.config({'batch_size': 8}))
  builders.write_tree(tmp_path, {'config.json': json.dumps(config)})
  lines = [json.dumps(record) + '\n' for record in _RECORDS]
  metrics, facts = tmp_path / 'metrics.jsonl', tmp_path / 'report' / 'run.json'
  facts.parent.mkdir()
  facts.write_text(json.dumps(_FACTS))
  metrics.write_text(''.join(lines))
  assert run_page.rewrite(str(tmp_path), '')
  text = (tmp_path / 'report' / 'index.html').read_text()
  for word in ('folder photos', '1 steps computed again', 'compiling', '50.0%', 'MFU', 'lenet'):
    assert word in text
  for i, record in enumerate(_RECORDS):
    for key in record:
      lines[i] = json.dumps(record | {key: value}) + '\n'
      metrics.write_text(''.join(lines))
      assert run_page.rewrite(str(tmp_path), '')
      (run,) = runs.find([str(tmp_path)])
      curves.curve('loss', run.train + run.validation, 1)
    lines[i] = json.dumps(record) + '\n'
  for key in (*_FACTS, ''):
    facts.write_text(json.dumps(_FACTS | {key: value} if key else value))
    run_page.rewrite(str(tmp_path), '')
    runs.find([str(tmp_path)])
  for text in (json.dumps(value), json.dumps([1, value]), '[1', '[-1, 2]', '[1, 2, 3]'):
    (tmp_path / 'class_sizes.json').write_text(text)
    sizes = run_dir.class_sizes(str(tmp_path), 2)
    assert sizes is None or sizes.min() >= 0 and sizes.shape == (2,)


def test_no_report_is_no_failure(tmp_path, config, monkeypatch, caplog):
  def full(*_):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(run_page, 'write', full)
  mesh = mesh_lib.create(config, jax.devices()[:1])
  summary.report(config, str(tmp_path), mesh, types.SimpleNamespace(params={}))
  assert 'no report' in caplog.text and 'No space left' in caplog.text


def test_the_score_of_no_image_is_no_number():
  assert analysis_page.score('seen_top1', float('nan')) == '-'
  assert analysis_page.score('seen_top1', 0.5) == '50.0%'
