"""A stand-in for S3: lists and reads of one bucket in memory, over HTTP.

It has what s3fs asks for to read; signatures are not looked at.
"""

import hashlib
from urllib import parse
from xml.sax import saxutils

from tests import http_server

BUCKET = 'bucket'


class Server(http_server.Server):
  """The server, on a port of its own while its context is open.

  Attributes:
    objects: name to content, of the one bucket.
  """

  def __init__(self):
    self.objects: dict[str, bytes] = {}
    super().__init__(_Handler)

  @property
  def environment(self) -> dict[str, str]:
    """What s3fs and botocore look up to find it."""
    return {
      'AWS_ENDPOINT_URL': self.url,
      'AWS_ACCESS_KEY_ID': 'key',
      'AWS_SECRET_ACCESS_KEY': 'secret',
      'AWS_DEFAULT_REGION': 'us-east-1',
    }

  def put(self, name: str, content: bytes) -> None:
    """Stores an object."""
    self.objects[name] = content


class _Handler(http_server.StoreHandler):
  """Answers one connection."""

  store: Server

  def do_GET(self):
    url = parse.urlsplit(self.path)
    bucket, _, name = parse.unquote(url.path[1:]).partition('/')
    query = dict(parse.parse_qsl(url.query))
    if bucket == BUCKET and not name:
      self._send(200, self._list(query.get('prefix', '')).encode())
    elif bucket == BUCKET and name in self.store.objects:
      self._send(200, self.store.objects[name])
    else:
      self._send(404, b'<Error><Code>NoSuchKey</Code></Error>')

  do_HEAD = do_GET

  def _list(self, prefix):
    entries = ''.join(
      f'<Contents><Key>{saxutils.escape(name)}</Key><ETag>{_tag(content)}'
      f'</ETag><Size>{len(content)}</Size><StorageClass>STANDARD</StorageClass>'
      '<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>'
      for name, content in sorted(self.store.objects.items())
      if name.startswith(prefix)
    )
    return (
      '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
      f'<Name>{BUCKET}</Name><IsTruncated>false</IsTruncated>{entries}'
      '</ListBucketResult>'
    )

  def _send(self, status, content):
    self.reply(status, {'Content-Length': len(content), 'ETag': _tag(content)}, content)


def _tag(content):
  return f'"{hashlib.md5(content).hexdigest()}"'
