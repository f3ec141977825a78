"""The secret of a run, which its processes prove to each other.

It is `ANP_RUN_SECRET`, or else a file in the workdir that only its owner may
read. It is never sent: keys and tokens are derived from it.
"""

from collections.abc import Mapping
import errno
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from typing import Any

from anp_jax import config as config_lib
from anp_jax.config import urls

VARIABLE = 'ANP_RUN_SECRET'
NAME = '.secret'
_BYTES = 32
_HEX = re.compile(f'(?:[0-9a-f]{{2}}){{{_BYTES},}}')
# A network file system may show the name of a file before what is in it. And
# where one host alone cannot write to the workdir, a process of another one
# makes the file, and all are then told which host it is.
_APPEARS_WITHIN = 30.0  # seconds


def for_run(workdir: str, environment: Mapping[str, str] = os.environ, makes: bool = True) -> str:
  """Returns the secret of the run in a workdir, at least 64 hexadecimal digits.

  The first process makes the file; a resumed run uses its file again.

  Args:
    workdir: folder that all processes share; '' or an object store's address
      holds no secret, so the variable must.
    environment: variables.
    makes: whether the file is made, or waited for, where it is missing.

  Raises:
    ConfigError: if the variable or the file is no secret, or there is none.
  """
  text = environment.get(VARIABLE)
  if text is not None:
    if not _HEX.fullmatch(text):
      raise config_lib.ConfigError(
        f'{VARIABLE} is no secret: expected at least {2 * _BYTES} hexadecimal '
        'digits in lower case, such as `openssl rand -hex 32` prints'
      )
    return text
  if not workdir or '://' in workdir:
    raise config_lib.ConfigError(
      f'several processes need {VARIABLE}, the same for each, unless they '
      'share a folder as --workdir (an object store must not hold it). For '
      f'example: export {VARIABLE}=$(openssl rand -hex 32)'
    )
  path = os.path.join(workdir, NAME)
  deadline = time.monotonic() + _APPEARS_WITHIN
  while True:
    is_last, problem = not makes or time.monotonic() > deadline, None
    try:
      if makes and not os.path.exists(path):
        os.makedirs(workdir, exist_ok=True)
        _create(path)
      text = _read(path)
      if _HEX.fullmatch(text):
        return text
    except OSError as e:
      problem = e
      # A file of somebody else, or a link, does not change by waiting.
      is_last |= os.path.lexists(path) and e.errno in (errno.EACCES, errno.EPERM, errno.ELOOP)
    if is_last and problem:
      raise config_lib.ConfigError(
        f'--workdir={urls.remote_url(workdir)}: the secret of the run, {NAME}, '
        f'cannot be read or written there ({problem.strerror}); or set {VARIABLE}'
      ) from problem
    if is_last:
      raise config_lib.ConfigError(
        f'{path} is no secret: remove it, and the next run makes another'
      )
    time.sleep(0.2)


def derive(secret: str, purpose: str) -> str:
  """Returns the key for one purpose, 64 hexadecimal digits.

  Args:
    secret: the run's secret, see `for_run`.
    purpose: name of a protocol; keys of two purposes tell nothing of each other
      (HMAC-SHA256).
  """
  return prove(secret, 'key', purpose)


def prove(key: str, *texts: str) -> str:
  """Returns the HMAC-SHA256 of texts, 64 hexadecimal digits."""
  message = '\n'.join(texts).encode()
  return hmac.new(bytes.fromhex(key), message, hashlib.sha256).hexdigest()


def is_proof(proof: Any, key: str, *texts: str) -> bool:
  """Whether `prove` gives this; the time does not depend on where texts differ."""
  return isinstance(proof, str) and hmac.compare_digest(proof.encode(), prove(key, *texts).encode())


def _create(path):
  """Creates the file at once with its text, unless another process is first."""
  draft = f'{path}.{secrets.token_hex(8)}'
  descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
  try:
    with open(descriptor, 'w') as f:
      f.write(secrets.token_hex(_BYTES))
      f.flush()
      os.fsync(f.fileno())
    try:
      os.link(draft, path)  # unlike a rename, replaces nothing
    except FileExistsError:
      pass
  finally:
    os.unlink(draft)


def _read(path):
  descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
  with open(descriptor, encoding='ascii', errors='replace') as f:
    status = os.fstat(f.fileno())
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
      raise config_lib.ConfigError(
        f'{path}: others may know this secret; expected a file of your own '
        'with mode 0600: remove it, and the next run makes another'
      )
    return f.read(1024)
