"""A certificate for tests with TLS."""

import subprocess

import pytest


def keys(folder) -> dict[str, str]:
  """Returns config keys with a new certificate of 127.0.0.1, and its key."""
  key, certificate = folder / 'key.pem', folder / 'certificate.pem'
  request = (
    'openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 '
    '-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1'
  )
  files = ['-keyout', str(key), '-out', str(certificate)]
  result = subprocess.run([*request.split(), *files], capture_output=True)
  if result.returncode:
    pytest.skip('openssl cannot make a certificate here')
  return {'strategy.tls_certificate': str(certificate), 'strategy.tls_key': str(key)}
