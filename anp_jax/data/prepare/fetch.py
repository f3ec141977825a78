"""Fetches the photographs of a list of URLs into a tree of class folders.

A list has a line for each photograph: its class, a TAB, its URL. What lies in the
tree is not fetched again. What is gone for good is noted in gone.csv at the root, and
not asked for again until that file is deleted.
"""

import collections
import contextlib
import csv
from email import utils
import hashlib
import math
from multiprocessing import pool
import os
import re
import time
from urllib import error, parse, request

import anp_jax
from anp_jax import config as config_lib
from anp_jax.data import vocabulary
from anp_jax.data.image_files import image_format, images
from anp_jax.data.prepare import examine
from anp_jax.data.sources import folder_names, image_folder
from anp_jax.system import files, progress as progress_lib, untrusted_text

SUFFIX, GONE = '.tsv', 'gone.csv'

_CONNECTIONS = 4  # in all, and so to one host at most
_TRIES, _MOST_FAILURES = 4, 20  # of a URL; of a host in a row, which is then not asked again
_TIMEOUT, _LONGEST = 30.0, 120.0  # seconds without a byte, and of a file
_PAUSE = 2.0  # seconds before a second try, twice as many before each further one
_LONGEST_PAUSE = 900.0  # seconds; a host that asks for more is not asked again
_MOST_BYTES = 32 << 20  # of a file
_LONGEST_NAME = 180  # letters, to which a file system's 255 leave some for a draft
_UNAVAILABLE = 'photo_unavailable'  # Flickr redirects to it from a photograph that is gone
_FOR_GOOD = ('HTTP 404', 'HTTP 410', 'placeholder', 'too large')
_URL = re.compile('https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?/[!-~]+')


class _NoPhotoError(Exception):
  """There is no photograph to be had; its text is the reason."""


def fetch(file: str, root: str) -> list[str]:
  """Fetches what the tree lacks and is not known to be gone.

  Args:
    file: list of URLs.
    root: folder of the class folders, created if missing.

  Returns:
    Lines to print: numbers of photographs, and reasons by number.

  Raises:
    ConfigError: naming the file and the line at fault.
    OSError: if the tree cannot be written.
  """
  photos = read(file)
  missing = [path for path in photos if not os.path.exists(os.path.join(root, path))]
  os.makedirs(root, exist_ok=True)
  note = os.path.join(root, GONE)
  if not os.path.exists(note):
    files.write_atomic(note, 'class,url,reason\n')
  try:
    with open(note, encoding='utf-8') as lines:
      gone = {row[1]: row[2] for row in csv.reader(lines) if len(row) == 3}
  except (csv.Error, UnicodeDecodeError) as e:
    raise config_lib.ConfigError(f'{note}: {e}; delete it to ask for all URLs again') from None
  tasks = [(path, photos[path]) for path in missing if photos[path] not in gone]
  failures: collections.Counter[str] = collections.Counter()
  progress = progress_lib.Progress('fetching', len(tasks), 0, 'not there', 10.0)
  with contextlib.closing(progress), pool.ThreadPool(_CONNECTIONS) as threads:
    for path, reason in threads.imap_unordered(_Fetcher(root).fetch, tasks):
      progress.add(1, bool(reason))
      if reason in _FOR_GOOD:
        gone[photos[path]] = reason
        label = untrusted_text.csv_cell(os.path.dirname(path))
        with open(note, 'a', encoding='utf-8') as lines:  # at once: it outlasts a kill
          csv.writer(lines, lineterminator='\n').writerow([label, photos[path], reason])
      elif reason:
        failures[reason] += 1
  reasons = collections.Counter(gone[photos[path]] for path in missing if photos[path] in gone)
  fetched = len(missing) - reasons.total() - failures.total()
  return [
    f'{root}: {fetched:,} fetched, {len(photos) - len(missing):,} there already, '
    f'{reasons.total():,} gone, {failures.total():,} failed',
    *_reasons(f'gone, see {note}', reasons),
    *_reasons('failed, the same command asks again', failures),
  ]


def read(file: str) -> dict[str, str]:
  """Returns the URLs of a list by path in the tree, CLASS/NAME.

  Raises:
    ConfigError: naming the file and the line at fault.
  """
  photos: dict[str, str] = {}
  for number, line in enumerate(vocabulary.read_lines(file), 1):
    label, _, url = line.partition('\t')
    name = _file_name(url)
    is_folder = label and '/' not in label and not vocabulary.has_control(label)
    if not name or not is_folder or folder_names.is_foreign(label):
      text = f'{line[:80]!r}, expected CLASS, a TAB and the URL of a file (http or https)'
      raise config_lib.ConfigError(f'{file}:{number}: {text}')
    path = f'{label}/{name}'
    if photos.get(path, url) != url:  # of another host, or another query
      path = f'{label}/{hashlib.sha256(url.encode()).hexdigest()[:16]}-{name}'
    photos[path] = url
  return photos


def _file_name(url):
  """A safe name of the file of a URL, with a suffix of images; '' for a bad URL."""
  if not _URL.fullmatch(url):
    return ''
  name = os.path.basename(parse.unquote(parse.urlsplit(url).path))
  name = re.sub(r'[^A-Za-z0-9._-]', '_', name)[-_LONGEST_NAME:].lstrip('.')
  return name if not name or name.lower().endswith(image_folder.ALL_SUFFIXES) else f'{name}.jpg'


def _reasons(title, counts):
  """A line with the reasons by number; none without a reason."""
  if counts:
    yield f'{title}: ' + ', '.join(f'{n:,} {reason}' for reason, n in counts.most_common())


class _Redirects(request.HTTPRedirectHandler):
  """Redirects to photographs only: the URL is the server's choice."""

  def redirect_request(self, req, fp, code, msg, headers, newurl):
    if _UNAVAILABLE in newurl or not newurl.startswith(('http:', 'https:')):
      fp.close()
      raise _NoPhotoError('placeholder' if _UNAVAILABLE in newurl else 'redirect to no http')
    return super().redirect_request(req, fp, code, msg, headers, newurl)


class _Fetcher:
  """Fetches photographs into a tree; threads share it."""

  def __init__(self, root: str):
    self._root = root
    self._opener = request.build_opener(_Redirects)
    self._opener.addheaders = [('User-Agent', f'anp_jax/{anp_jax.__version__}')]
    # By host: the monotonic time before which it is not asked; how often since its last
    # photograph it was too busy or did not answer.
    self._resume: dict[str, float] = collections.defaultdict(float)
    self._failures: collections.Counter[str] = collections.Counter()

  def fetch(self, task: tuple[str, str]) -> tuple[str, str]:
    """Fetches a photograph by (path, URL); returns its path, and why not or ''."""
    path, url = task
    try:
      data = self._answer(url)
    except _NoPhotoError as e:
      return path, str(e)
    place = os.path.join(self._root, path)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    files.write_atomic(place, data)
    return path, ''

  def _answer(self, url) -> bytes:
    """The bytes at a URL, asked for several times where its host does not answer."""
    host = parse.urlsplit(url).netloc
    for i in range(_TRIES):
      while (pause := self._resume[host] - time.monotonic()) > 0:
        if pause > _LONGEST_PAUSE:
          raise _NoPhotoError('not asked: the host is busy or does not answer')
        time.sleep(pause)
      pause = _PAUSE * 2**i
      try:
        data = self._read(url)
        self._failures[host] = 0
        return data
      except _NoPhotoError:
        raise
      except error.HTTPError as e:
        e.close()
        reason = f'HTTP {e.code}'
        if e.code not in (429, 503):
          raise _NoPhotoError(reason) from e
        pause = _seconds(e.headers.get('Retry-After', ''), pause)
      except Exception as e:  # noqa: BLE001 - an answer may be anything
        reason = type(e.args[0] if isinstance(e, error.URLError) else e).__name__
      self._failures[host] += 1
      if self._failures[host] >= _MOST_FAILURES:
        pause = math.inf
      self._resume[host] = max(self._resume[host], time.monotonic() + pause)
    raise _NoPhotoError(reason)

  def _read(self, url):
    end = time.monotonic() + _LONGEST
    with self._opener.open(url, timeout=_TIMEOUT) as answer:
      text = answer.headers.get('Content-Length', '')
      size = int(text) if text.isdecimal() else None
      data = bytearray()
      while block := b'' if len(data) == size else answer.read1(1 << 16):
        data += block
        if max(size or 0, len(data)) > _MOST_BYTES:
          raise _NoPhotoError('too large')
        if time.monotonic() > end:
          raise TimeoutError
    if len(data) < (size or 0):
      raise EOFError
    if not image_format.sniff(data):
      raise _NoPhotoError('no image')
    if len(data) <= examine.PLACEHOLDER_BYTES:
      with contextlib.suppress(OSError, ValueError):  # damaged: prepare decides
        image = images.open_image(bytes(data), config_lib.MOST_MEGAPIXELS, must_be_whole=False)
        if min(image.size) >= examine.PLACEHOLDER_SIDE:
          raise _NoPhotoError('placeholder')
    return bytes(data)


def _seconds(text, default):
  """The seconds that Retry-After asks to wait, by a number or a date."""
  if re.fullmatch('[0-9]{1,9}', text):
    return float(text)
  try:
    return utils.parsedate_to_datetime(text).timestamp() - time.time()
  except (ValueError, OverflowError):
    return default
