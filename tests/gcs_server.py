"""A stand-in for Google Cloud Storage: its JSON API, in memory, on a port.

It has what gcsfs, google-cloud-storage and TensorStore ask for. Objects are
those of https://cloud.google.com/storage/docs/json_api/v1.
"""

import base64
import hashlib
import itertools
import json
import pathlib
import re
import threading
from urllib import parse

from tests import builders, http_server

BUCKET = 'bucket'


class Server(http_server.Server):
  """The server, on a port of its own while its context is open.

  Attributes:
    objects: name to content, of the one bucket.
    requests: (method, path) of all, in order.
  """

  def __init__(self):
    self.objects: dict[str, bytes] = {}
    self.generations: dict[str, int] = {}
    self.requests = []
    self.uploads = {}
    self.counter = itertools.count(1)
    self.lock = threading.RLock()
    super().__init__(_Handler)

  @property
  def environment(self) -> dict[str, str]:
    """What its clients look up to find it."""
    return {
      'STORAGE_EMULATOR_HOST': self.url,
      'TENSORSTORE_GCS_HTTP_URL': self.url,
      'GOOGLE_AUTH_TOKEN_FOR_TESTING': 'none',
      # Else gcsfs asks for the kind of a bucket, over gRPC and with a key.
      'GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT': 'false',
    }

  def write_files(self, prefix: str, folder: pathlib.Path) -> pathlib.Path:
    """Writes the objects below a prefix as files; returns the folder."""
    start = prefix + '/'
    files = {n.removeprefix(start): c for n, c in self.objects.items() if n.startswith(start)}
    return builders.write_tree(folder, files)

  def put(self, name: str, content: bytes) -> None:
    """Stores an object."""
    with self.lock:
      self.objects[name] = content
      self.generations[name] = next(self.counter)

  def remove(self, name: str) -> None:
    """Deletes an object."""
    with self.lock:
      del self.objects[name], self.generations[name]

  def resource(self, name: str) -> dict:
    """The metadata of an object."""
    content, generation = self.objects[name], str(self.generations[name])
    digest = hashlib.md5(content).digest()
    return {
      'kind': 'storage#object',
      'bucket': BUCKET,
      'name': name,
      'id': f'{BUCKET}/{name}/{generation}',
      'size': str(len(content)),
      'generation': generation,
      'metageneration': '1',
      'etag': generation,
      'md5Hash': base64.b64encode(digest).decode(),
      'timeCreated': '2026-01-01T00:00:00.000Z',
      'updated': '2026-01-01T00:00:00.000Z',
    }


class _Handler(http_server.StoreHandler):
  """Answers one connection."""

  store: Server

  def _serve(self):
    url = parse.urlsplit(self.path)
    query = dict(parse.parse_qsl(url.query, keep_blank_values=True))
    length = int(self.headers.get('Content-Length') or 0)
    body = self._chunked() if self._is_chunked() else self.rfile.read(length)
    with self.store.lock:
      self.store.requests.append((self.command, self.path))
      if url.path.startswith('/batch'):
        return self._batch(body)
      if url.path.startswith('/upload'):
        return self._upload(query, body)
      status, content = self._answer(self.command, url.path, query)
    self._send(status, content)

  do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _serve

  def _is_chunked(self):
    return self.headers.get('Transfer-Encoding', '').lower() == 'chunked'

  def _chunked(self):
    body = b''
    while size := int(self.rfile.readline(), 16):
      body += self.rfile.read(size)
      self.rfile.readline()
    self.rfile.readline()
    return body

  def _answer(self, method, path, query):
    """The status, and an object of JSON or bytes."""
    store = self.store
    match = re.fullmatch(r'(?:/download)?/storage/v1/b/([^/]+)(/o)?(/.*)?', path)
    if not match or match[1] != BUCKET:
      return 404, {'error': {'code': 404, 'message': f'no bucket: {path}'}}
    if not match[2]:
      return 200, {
        'kind': 'storage#bucket',
        'name': BUCKET,
        'id': BUCKET,
        'location': 'US',
        'storageClass': 'STANDARD',
      }
    if not match[3]:
      return 200, self._list(query)
    name, how, target = re.fullmatch(
      '/([^/]+)(?:/(rewriteTo/b/[^/]+|moveTo)/o/(.+))?', match[3]
    ).groups()
    name = parse.unquote(name)
    if name not in store.objects:
      return 404, {'error': {'code': 404, 'message': f'no object: {name}'}}
    if target:
      target = parse.unquote(target)
      store.put(target, store.objects[name])
      if how == 'moveTo':
        store.remove(name)
        return 200, store.resource(target)
      size = str(len(store.objects[name]))
      return 200, {
        'done': True,
        'objectSize': size,
        'totalBytesRewritten': size,
        'resource': store.resource(target),
      }
    if method == 'DELETE':
      store.remove(name)
      return 204, b''
    if query.get('ifGenerationNotMatch') == str(store.generations[name]):
      return 304, b''
    if query.get('alt') == 'media':
      return 200, _Content(store.objects[name], store.resource(name))
    return 200, store.resource(name)

  def _list(self, query):
    prefix, delimiter = query.get('prefix', ''), query.get('delimiter', '')
    start, end = query.get('startOffset', ''), query.get('endOffset', '')
    items, prefixes = [], set()
    for name in sorted(self.store.objects):
      if not name.startswith(prefix) or name < start or end and name >= end:
        continue
      head, mark, _ = name[len(prefix) :].partition(delimiter or '\0')
      if mark:
        prefixes.add(prefix + head + delimiter)
      else:
        items.append(self.store.resource(name))
    return {'kind': 'storage#objects', 'items': items, 'prefixes': sorted(prefixes)}

  def _upload(self, query, body):
    kind = query.get('uploadType')
    if kind == 'multipart':
      boundary = re.search('boundary="?([^";]+)', self.headers['Content-Type'])[1]
      parts = body.split(b'--' + boundary.encode())[1:3]
      meta, content = (p.split(b'\r\n\r\n' if b'\r\n\r\n' in p else b'\n\n', 1)[1] for p in parts)
      name = json.loads(meta)['name']
      end = b'\r\n' if content.endswith(b'\r\n') else b'\n'
      return self._store(query, name, content.removesuffix(end))
    if kind == 'media':
      return self._store(query, query['name'], body)
    if 'upload_id' not in query:  # a resumable one begins
      name = query.get('name') or json.loads(body)['name']
      session = str(next(self.store.counter))
      self.store.uploads[session] = name, b''
      where = f'{self.store.url}{self.path}&upload_id={session}'
      return self._send(200, b'', {'Location': where})
    session = query['upload_id']
    name, before = self.store.uploads[session]
    content = before + body
    self.store.uploads[session] = name, content
    if self.headers.get('Content-Range', '').endswith('/*'):
      return self._send(308, b'', {'Range': f'bytes=0-{len(content) - 1}'})
    return self._store(query, name, content)

  def _store(self, query, name, content):
    expected = query.get('ifGenerationMatch')
    if expected and expected != str(self.store.generations.get(name, 0)):
      return self._send(412, {'error': {'code': 412, 'message': 'changed'}})
    self.store.put(name, content)
    self._send(200, self.store.resource(name))

  def _batch(self, body):
    """Deletes, as gcsfs sends them: many in one request."""
    answers = []
    for number, line in enumerate(re.findall(rb'DELETE (\S+) HTTP', body), 1):
      path = parse.urlsplit(line.decode()).path
      status, _ = self._answer('DELETE', path, {})
      answers.append(
        f'--batch\r\nContent-Type: application/http\r\nContent-ID: '
        f'<response-{number}>\r\n\r\nHTTP/1.1 {status} x\r\n\r\n\r\n'
      )
    self._send(
      200,
      (''.join(answers) + '--batch--').encode(),
      {'Content-Type': 'multipart/mixed; boundary=batch'},
    )

  def _send(self, status, content, headers=()):
    headers = dict(headers)
    if isinstance(content, _Content):
      headers |= content.headers
      content = content.content
      match = re.fullmatch(r'bytes=(\d+)-(\d*)', self.headers.get('Range', ''))
      if match:
        first, size = int(match[1]), len(content)
        last = min(int(match[2] or size - 1), size - 1)
        status = 206 if first <= last else 416
        headers['Content-Range'] = f'bytes {first}-{last}/{size}'
        content = content[first : last + 1]
    elif isinstance(content, dict):
      content = json.dumps(content).encode()
      headers['Content-Type'] = 'application/json'
    if status not in (204, 304):
      headers['Content-Length'] = len(content)
    self.reply(status, headers, content)


class _Content:
  """The bytes of an object, with the headers of its download."""

  def __init__(self, content, resource):
    self.content = content
    self.headers = {
      'Content-Type': 'application/octet-stream',
      'ETag': resource['etag'],
      'x-goog-generation': resource['generation'],
      'x-goog-hash': f'md5={resource["md5Hash"]}',
    }
