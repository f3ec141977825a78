"""The metadata server of a Google TPU VM, which describes the pod."""

from collections.abc import Mapping
import re
import time
import urllib.error
import urllib.request

from anp_jax import config as config_lib

_SERVER = 'metadata.google.internal'
_PATH = '/computeMetadata/v1/instance/attributes/'
_TIMEOUT = 5.0  # seconds
# The server of a VM that has just started may not be ready.
_TRIES, _RETRY = 6, 0.5  # seconds


def variables(environment: Mapping[str, str]) -> dict[str, str]:
  """The variables that GKE would set, for a VM without it.

  Args:
    environment: variables; GCE_METADATA_IP names another server.

  Returns:
    TPU_WORKER_HOSTNAMES, TPU_WORKER_ID and MEGASCALE_NUM_SLICES; {} where no
    server answers or its answers name no workers.

  Raises:
    ConfigError: if the server names the workers in an unknown way.
  """
  server = environment.get('GCE_METADATA_IP') or _SERVER
  number = _ask(server, 'agent-worker-number')
  workers = _ask(server, 'worker-network-endpoints') if number else ''
  if not workers:
    return {}
  slices = re.search(
    r"^\s*MEGASCALE_NUM_SLICES\s*:\s*'?([^'\s]*)", _ask(server, 'tpu-env'), re.MULTILINE
  )
  return {
    'TPU_WORKER_HOSTNAMES': ','.join(_host(w) for w in workers.split(',')),
    'TPU_WORKER_ID': number,
    'MEGASCALE_NUM_SLICES': slices[1] if slices else '',
  }


def _host(worker):
  """The host of 'host', or of 'name:number:address' from older servers."""
  fields = worker.strip().split(':')
  if len(fields) not in (1, 3):
    raise config_lib.ConfigError(
      f'worker-network-endpoints of the metadata server has {worker!r}: '
      'expected HOST or NAME:NUMBER:ADDRESS'
    )
  return fields[-1]


def _ask(server, key):
  """The text of an attribute; '' where it is missing or nobody answers."""
  request = urllib.request.Request(
    f'http://{server}{_PATH}{key}', headers={'Metadata-Flavor': 'Google'}
  )
  # Never over a proxy: the server is the machine's own.
  opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
  for left in reversed(range(_TRIES)):
    try:
      with opener.open(request, timeout=_TIMEOUT) as answer:
        return answer.read().decode().strip()
    except urllib.error.HTTPError as e:
      if e.code == 404:
        break
    except OSError:
      pass
    if left:
      time.sleep(_RETRY)
  return ''
