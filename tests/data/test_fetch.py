"""Tests of prepare with a list of URLs, against a server of this process."""

import contextlib
import datetime
from email import utils
import os
import threading
import time

from PIL import Image
import pytest

from anp_jax.data.prepare import fetch
from tests import builders, http_server, launching, prepared


class _Server(http_server.Server):
  """A server of photographs on a port of its own.

  Attributes:
    answers: an answer by path: bytes, a status, (status, headers), or a function of the handler.
    requests: path, headers and monotonic time of every request.
    most: requests answered at the same time, at most.
  """

  def __init__(self):
    self.answers: dict[str, object] = {}
    self.requests: list[tuple] = []
    self.most = 0
    self.open = 0
    self.lock = threading.Lock()
    super().__init__(_Handler)

  def place(self, path):
    """The URL of a path."""
    return f'{self.url}/{path}'

  def paths(self):
    """Paths that were asked for since the last call."""
    paths = [path for path, *_ in self.requests]
    self.requests.clear()
    return paths


class _Handler(http_server.Handler):
  """Answers one request."""

  def do_GET(self):
    site = self.store
    with site.lock:
      site.open += 1
      site.most = max(site.most, site.open)
      site.requests.append((self.path[1:], self.headers, time.monotonic()))
    answer = site.answers.get(self.path[1:], 404)
    if isinstance(answer, list):  # one after another
      answer = answer.pop(0)
    if callable(answer):
      answer = answer(self)
    if isinstance(answer, bytes):
      self.reply(200, {'Content-Length': len(answer)}, answer)
    elif answer is not None:
      self.reply(*(answer if isinstance(answer, tuple) else (answer, {})))
    with site.lock:
      site.open -= 1


@pytest.fixture
def site(monkeypatch):
  for name in ('http_proxy', 'https_proxy', 'all_proxy'):
    monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(name.upper(), raising=False)
  monkeypatch.setattr(fetch, '_PAUSE', 0.01)
  with _Server() as site:
    yield site


def _list(folder, *rows):
  """Writes a list of (class, URL) rows; returns its path."""
  path = folder / 'urls.tsv'
  path.write_text(''.join(f'{label}\t{url}\n' for label, url in rows))
  return str(path)


def _fetch(folder, site, answers, label='happy_dog'):
  """Fetches photographs of one class; returns the first line and the tree."""
  site.answers |= answers
  file = _list(folder, *((label, site.place(path)) for path in answers))
  lines = fetch.fetch(file, str(folder / 'tree'))
  return lines, builders.read_tree(folder / 'tree')


def _gone(folder):
  return folder / 'tree' / 'gone.csv'


def test_prepare_makes_a_set_of_what_is_still_there(site, tmp_path, capsys):
  rows = []
  for label in ('happy_dog', 'sad_dog'):
    for i in range(12):
      site.answers[f'{label}/{i}_a.jpg'] = prepared.photo(len(rows))
      rows.append((label, site.place(f'{label}/{i}_a.jpg')))
  gone = site.place('1/404_a.jpg')
  file = _list(tmp_path, *rows, ('sad_dog', gone))
  root = tmp_path / 'photos'
  lines = prepared.make(capsys, file, tmp_path, f'--path={root}').splitlines()
  assert lines[0] == f'{root}: 24 fetched, 0 there already, 1 gone, 0 failed'
  assert lines[1] == f'gone, see {root}/gone.csv: 1 HTTP 404'
  assert '2 classes of 2 adjectives and 1 noun' in lines
  names = prepared.names(tmp_path) + prepared.names(tmp_path, 'validation')
  assert sorted(names) == sorted(f'{label}/{url.rpartition("/")[2]}' for label, url in rows)
  assert (root / 'gone.csv').read_text() == f'class,url,reason\nsad_dog,{gone},HTTP 404\n'
  assert len(site.paths()) == 25
  # The same command asks for nothing.
  line, *_ = prepared.make(capsys, file, tmp_path, f'--path={root}').splitlines()
  assert site.paths() == []
  assert line == f'{root}: 0 fetched, 24 there already, 1 gone, 0 failed'


def test_what_is_gone_is_asked_for_again_after_its_report_is_deleted(site, tmp_path):
  answers = {'1.jpg': 404, '2.jpg': 410, '3.jpg': 403}
  _fetch(tmp_path, site, answers)
  reasons = [line.rpartition(',')[2] for line in _gone(tmp_path).read_text().splitlines()]
  assert sorted(reasons) == ['HTTP 404', 'HTTP 410', 'reason']
  assert sorted(site.paths()) == ['1.jpg', '2.jpg', '3.jpg']
  lines, _ = _fetch(tmp_path, site, answers)
  assert site.paths() == ['3.jpg']  # not said to be gone
  assert lines[0].endswith(': 0 fetched, 0 there already, 2 gone, 1 failed')
  assert lines[2] == 'failed, the same command asks again: 1 HTTP 403'
  _gone(tmp_path).write_bytes(b'class,url,reason\n\xff')
  builders.assert_refused('gone.csv: .*; delete it to ask', _fetch, tmp_path, site, answers)
  _gone(tmp_path).unlink()
  _, tree = _fetch(tmp_path, site, answers | {'1.jpg': prepared.photo(1)})
  assert tree['happy_dog/1.jpg'] == prepared.photo(1)


def test_a_killed_command_resumes(site, tmp_path):
  first, second, stop = prepared.photo(1), prepared.photo(2), threading.Event()

  def half(handler):
    handler.reply(200, {'Content-Length': len(second)}, second[:-9])
    stop.wait(60)

  site.answers |= {'1.jpg': first, '2.jpg': half, '3.jpg': 404}
  file = _list(tmp_path, *(('a', site.place(f'{i}.jpg')) for i in (3, 1, 2)))
  process = prepared.start(*prepared.flags(file, tmp_path / 'sets'))
  note = tmp_path / 'urls' / 'gone.csv'  # the tree has the list's name
  launching.wait_until(
    lambda: (tmp_path / 'urls/a/1.jpg').exists() and 'HTTP 404' in note.read_text(), 60
  )
  process.kill()
  process.communicate()
  stop.set()
  assert sorted(site.paths()) == ['1.jpg', '2.jpg', '3.jpg']
  assert os.listdir(tmp_path / 'urls' / 'a') == ['1.jpg']
  site.answers['2.jpg'] = second
  fetch.fetch(file, str(tmp_path / 'urls'))
  assert site.paths() == ['2.jpg']
  tree = builders.read_tree(tmp_path / 'urls')
  assert (tree['a/1.jpg'], tree['a/2.jpg']) == (first, second)


def test_a_torn_answer_is_asked_for_again(site, tmp_path):
  photo = prepared.photo(1)

  def half(handler):
    handler.reply(200, {'Content-Length': len(photo)}, photo[:-9])

  lines, tree = _fetch(tmp_path, site, {'1.jpg': [half, half, photo], '2.jpg': [half] * 9})
  assert tree.keys() == {'happy_dog/1.jpg', 'gone.csv'} and tree['happy_dog/1.jpg'] == photo
  assert lines[1:] == ['failed, the same command asks again: 1 EOFError']
  assert sorted(site.paths()) == ['1.jpg'] * 3 + ['2.jpg'] * 4


@pytest.mark.parametrize('status', [429, 503])
def test_a_busy_host_is_left_alone_for_as_long_as_it_asks(status, site, tmp_path):
  photo = prepared.photo(1)
  lines, tree = _fetch(tmp_path, site, {'1.jpg': [(status, {'Retry-After': '1'}), photo]})
  times = [time for *_, time in site.requests]
  assert len(times) == 2 and times[1] - times[0] >= 1
  assert tree['happy_dog/1.jpg'] == photo and len(lines) == 1


def test_a_host_that_asks_for_a_day_is_not_asked_again(site, tmp_path, monkeypatch):
  monkeypatch.setattr(fetch, '_CONNECTIONS', 1)
  lines, _ = _fetch(tmp_path, site, {f'{i}.jpg': (429, {'Retry-After': '86400'}) for i in range(9)})
  assert len(site.paths()) == 1
  assert lines[1].endswith(': 9 not asked: the host is busy or does not answer')


def test_a_host_that_never_answers_is_not_asked_for_all(site, tmp_path, monkeypatch):
  monkeypatch.setattr(fetch, '_MOST_FAILURES', 6)
  monkeypatch.setattr(fetch, '_PAUSE', 0.0)
  lines, _ = _fetch(tmp_path, site, {f'{i}.jpg': 503 for i in range(50)})
  assert 6 <= len(site.paths()) <= 6 + 3  # other threads are asking
  assert lines[0].endswith(', 50 failed')
  # Failures count in a row only.
  answers = {f'{i}.png': [503, prepared.photo(i)] for i in range(9)}
  monkeypatch.setattr(fetch, '_CONNECTIONS', 1)
  assert _fetch(tmp_path, site, answers)[0][0].endswith(
    ': 9 fetched, 0 there already, 0 gone, 0 failed'
  )
  with _Server() as closed:
    pass
  lines = fetch.fetch(_list(tmp_path, ('a', closed.place('1.jpg'))), str(tmp_path / 'tree'))
  assert lines[1] == 'failed, the same command asks again: 1 ConnectionRefusedError'


def test_waits_that_hosts_ask_for():
  later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=100)
  # A date has whole seconds.
  assert 98 < fetch._seconds(utils.format_datetime(later, usegmt=True), 3) <= 100
  assert fetch._seconds('120', 3) == 120
  for text in ('', 'soon', '-1', '1' * 40, '٣'):
    assert fetch._seconds(text, 3) == 3


def test_requests_are_few_at_a_time_and_name_the_package(site, tmp_path):
  def slow(handler):
    time.sleep(0.05)
    return prepared.photo(1)

  _fetch(tmp_path, site, {f'{i}.jpg': slow for i in range(20)})
  assert 1 < site.most <= 4
  assert {headers['User-Agent'] for _, headers, _ in site.requests} == {'anp_jax/0.1.0'}


def test_placeholders_of_flickr_are_gone(site, tmp_path):
  blank = prepared.files_of_every_kind()['train/old_dog/gone.jpg']
  moved = (302, {'Location': site.place('images/en-us/photo_unavailable.png')})
  gif = builders.encode_image(Image.new('L', (500, 374)), 'GIF')
  answers = {'1.jpg': blank, '2.jpg': moved, '3.jpg': prepared.photo(1), '4.jpg': gif}
  lines, tree = _fetch(tmp_path, site, answers)
  assert lines[1].endswith(': 3 placeholder')
  assert tree.keys() == {'gone.csv', 'happy_dog/3.jpg'}
  assert sorted(site.paths()) == sorted(answers)  # the picture itself is not asked for


def test_redirects_lead_to_http_only(site, tmp_path):
  secret = tmp_path / 'secret.jpg'
  secret.write_bytes(prepared.photo(1))
  answers = {
    '1.jpg': (302, {'Location': f'file://{secret}'}),
    '2.jpg': (301, {'Location': 'ftp://127.0.0.1/x.jpg'}),
    '3.jpg': (302, {'Location': site.place('3.jpg')}),  # for ever
    '4.jpg': (308, {'Location': site.place('moved')}),
    '5.jpg': (302, {'Location': 'http://[bad'}),
    '6.jpg': (302, {'Location': f'http://{"a" * 70}.org/1.jpg'}),
  }
  site.answers['moved'] = prepared.photo(4)
  lines, tree = _fetch(tmp_path, site, answers)
  assert tree.keys() == {'gone.csv', 'happy_dog/4.jpg'}
  assert lines[0].endswith(': 1 fetched, 0 there already, 0 gone, 5 failed')
  assert '1 redirect to no http' in lines[1] and '2 HTTP 302' in lines[1]


def test_large_and_slow_files_and_pages_are_left(site, tmp_path, monkeypatch):
  photo = prepared.photo(1)
  monkeypatch.setattr(fetch, '_MOST_BYTES', len(photo))
  monkeypatch.setattr(fetch, '_LONGEST', 0.3)
  monkeypatch.setattr(fetch, '_TRIES', 1)

  def drip(handler):
    handler.reply(200, {}, photo[:1])
    with contextlib.suppress(OSError):
      for _ in range(40):
        time.sleep(0.05)
        handler.wfile.write(b'x')

  answers = {
    'announced.jpg': lambda handler: handler.reply(200, {'Content-Length': 10**12}, photo),
    'endless.jpg': lambda handler: handler.reply(200, {}, photo + b'x'),
    'fits.jpg': photo,
    'damaged.jpg': photo[:20],  # prepare decides what becomes of it
    'page.jpg': b'<html>' + b'x' * 20,
    'empty.jpg': b'',
    'drip.jpg': drip,
  }
  start = time.monotonic()
  lines, tree = _fetch(tmp_path, site, answers)
  assert time.monotonic() - start < 2  # the drip alone takes as long
  assert tree.keys() == {'gone.csv', 'happy_dog/fits.jpg', 'happy_dog/damaged.jpg'}
  assert lines[1].endswith(': 2 too large')
  assert lines[2].endswith(': 2 no image, 1 TimeoutError')


@pytest.mark.parametrize(
  'path, name',
  (
    ('..%2F..%2F..%2Fevil.jpg', 'evil.jpg'),
    ('a/../../evil.jpg', 'evil.jpg'),
    ('%2e%2e', None),
    ('.%00hidden%0a.png', '_hidden_.png'),
    ('C:%5Cx%5C..%5Cy.gif', 'C__x_.._y.gif'),
    ('photo.php?id=1', 'photo.php.jpg'),
    ('-rf.jpg', '-rf.jpg'),
    ('x' * 400 + '.jpg', 'x' * 176 + '.jpg'),
    ('folder/', None),
  ),
)
def test_names_of_files_cannot_leave_the_tree(path, name, site, tmp_path):
  file = _list(tmp_path, ('happy_dog', site.place(path)))
  if name is None:
    builders.assert_refused('urls.tsv:1: ', fetch.read, file)
    return
  assert fetch.read(file) == {f'happy_dog/{name}': site.place(path)}


def test_photographs_of_one_name_are_all_fetched(site, tmp_path):
  answers = {f'photo.php?id={i}': prepared.photo(i) for i in range(3)}
  _, tree = _fetch(tmp_path, site, answers)
  assert sorted(v for k, v in tree.items() if k != 'gone.csv') == sorted(answers.values())
  assert 'happy_dog/photo.php.jpg' in tree
  site.paths()
  again = _fetch(tmp_path, site, answers)
  assert again[0][0].endswith(': 0 fetched, 3 there already, 0 gone, 0 failed')
  assert site.paths() == []
  file = _list(tmp_path, *[('sad_dog', site.place('photo.php?id=1'))] * 2)  # listed twice
  assert len(fetch.read(file)) == 1


@pytest.mark.parametrize(
  'line',
  (
    'happy_dog http://x/1.jpg',
    '\thttp://x/1.jpg',
    'happy_dog\t',
    'happy_dog\tfile:///etc/passwd.jpg',
    'happy_dog\tftp://x/1.jpg',
    'happy_dog\t/1.jpg',
    'happy_dog\thttp:///1.jpg',
    'happy_dog\thttp://name:password@x/1.jpg',
    'happy_dog\thttp://x:port/1.jpg',
    'happy_dog\thttp://[x/1.jpg',
    'happy_dog\thttp://x/a b.jpg',
    'happy_dog\thttp://x/1.jpg\t3',
    '..\thttp://x/1.jpg',
    '../up\thttp://x/1.jpg',
    'brave_9/../../up\thttp://x/1.jpg',
    '.git\thttp://x/1.jpg',
    'sad\x1bdog\thttp://x/1.jpg',
    '',
  ),
)
def test_bad_lines_are_named(line, tmp_path, capsys):
  (tmp_path / 'urls.tsv').write_text(f'sad_dog\thttp://x/0.jpg\n{line}\nsad_dog\thttp://x/2.jpg')
  error = prepared.error(capsys, *prepared.flags(tmp_path / 'urls.tsv', tmp_path))
  assert error.startswith(f'error: {tmp_path}/urls.tsv:2: ') and error.isprintable()
  assert not (tmp_path / 'urls').exists()


def test_a_tree_that_cannot_be_written_is_one_line(site, tmp_path, capsys):
  site.answers['1.jpg'] = prepared.photo(1)
  builders.write_tree(tmp_path, {'photos/happy_dog': b'a file'})
  flags = prepared.flags(_list(tmp_path, ('happy_dog', site.place('1.jpg'))), tmp_path)
  error = prepared.error(capsys, *flags, f'--path={tmp_path}/photos')
  assert f'{tmp_path}/photos/happy_dog' in error
  error = prepared.error(capsys, *flags, f'--path={tmp_path}/urls.tsv')
  assert 'is a file, expected a folder' in error
