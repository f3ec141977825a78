"""What a process tells the others before they start, and what must agree."""

from collections.abc import MutableMapping
import contextlib
import hashlib
import importlib.metadata
import os
import pathlib
import platform as platform_lib
import re
import socket
import sys

import ml_collections

from anp_jax import config as config_lib
from anp_jax.cluster import cluster_env, generation
from anp_jax.config import strategy as strategy_lib
from anp_jax.system import onednn, xla_flags

_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'pillow')
# They decode images; the last that is installed.
_TENSORFLOW = ('tensorflow', 'tensorflow-cpu')
_CLASS = re.compile(r'([A-Za-z_]\w*(?:\.\w+)*):[A-Za-z_]\w*')


def collect(
  env: cluster_env.ClusterEnv,
  config: ml_collections.ConfigDict,
  command: dict,
  environment: MutableMapping[str, str] = os.environ,
) -> dict:
  """Describes this process in JSON values; JAX is not imported.

  Args:
    env: place of this process.
    config: the run's config.
    command: flags that must be the same in all processes, by name.
    environment: variables.
  """
  platform = xla_flags.platform(environment)
  strategy, mode = strategy_lib.find(config), command.get('--mode', '')
  current = generation.current(environment)
  return {
    'index': env.index,
    'count': env.count,
    'token': env.token,
    'host': socket.gethostname(),
    'local_index': env.local_index,
    'platform': platform,
    'problem': startup_problem(environment),
    'gpus': gpus(environment) if platform == 'gpu' else [],
    'loopback': _name_is_loopback(),
    'versions': versions(),
    'code': _code(),
    'modules': _user_modules(config),
    'config': {k: repr(v) for k, v in config_lib.flat(config).items()},
    'command': command,
    'cpu_library': _cpu_library(config, platform),
    'steps_together': strategy.steps_together,
    'mixes_platforms': strategy.mixes_platforms(config, mode),
    'elastic': strategy.is_elastic and config.cluster.elastic == 'auto' and mode == 'train',
    'has_state': any(os.fstat(file).st_size for file in current.descriptors.values()),
    'devices': current.devices,
    'address': None,
    'optional': [i for i in range(env.count) if not strategy.run_ends_if_lost(config, mode, i)],
  }


def versions() -> dict[str, str]:
  """Returns the versions of Python and the packages that a run computes with, by name."""
  result = {'Python': '.'.join(platform_lib.python_version_tuple()[:2]), 'tensorflow': ''}
  result |= {name: importlib.metadata.version(name) for name in _PACKAGES}
  for name in _TENSORFLOW:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
      result['tensorflow'] = importlib.metadata.version(name)
  return result


def _cpu_library(config, platform):
  """The CPU's library, if a run must be the same to the bit; or ''."""
  settings = strategy_lib.find(config).xla_settings(config)
  if platform != 'cpu' or not settings.get('deterministic'):
    return ''
  library = None if config.model.cpu_library == 'xla' else onednn.find()
  return f'oneDNN {library.version}, {library.isa}' if library else 'XLA alone'


def startup_problem(environment: MutableMapping[str, str] = os.environ) -> str:
  """Why this process cannot start, whatever the others are; or ''."""
  allocated = _slurm_gpus(environment)
  platform = xla_flags.platform(environment)
  if not allocated or platform == 'gpu' or environment.get('JAX_PLATFORMS'):
    return xla_flags.missing_plugin(environment)
  hidden = environment.get('CUDA_VISIBLE_DEVICES')
  why = (
    f'CUDA_VISIBLE_DEVICES={hidden!r} hides them'
    if hidden is not None and hidden.strip() in ('', '-1')
    else 'JAX has no CUDA here: make setup ACCELERATOR=cuda13, or check that the driver is loaded'
  )
  return (
    f'Slurm gave this job GPUs ({allocated}), but JAX would compute on '
    f'{platform}: {why}; JAX_PLATFORMS=cpu if that is meant'
  )


def name(info: dict) -> str:
  """'rank 1 on node2'."""
  return f'rank {info["index"]} on {info["host"]}'


def mismatch_with_first(infos: list[dict]) -> str:
  """Why one of some processes does not go with the first of them; or ''.

  How they share GPUs does not count: that takes all processes of a host.

  Args:
    infos: descriptions from `collect`.
  """
  for info in infos:
    if info['problem']:
      return f'{name(info)}: {info["problem"]}'
  first = infos[0]
  for info in infos[1:]:
    if text := run_mismatch(info, first):
      return text
    if info['platform'] != first['platform'] and not first['mixes_platforms']:
      return (
        f'{name(info)} would compute on {info["platform"]}, {name(first)} on {first["platform"]}'
      )
    if info['cpu_library'] != first['cpu_library']:
      return (
        f'{name(info)} would compute with {info["cpu_library"]}, {name(first)} '
        f'with {first["cpu_library"]}: expected the same, for the same bits; '
        '--config.model.cpu_library=xla computes with XLA alone everywhere'
      )
  if len({info['host'] for info in infos}) > 1 and first['platform'] == 'cpu':
    for info in infos:
      if info['loopback']:
        return (
          f'{name(info)}: its own name resolves to {info["loopback"]}, '
          'where no other host finds it; give it its real address in '
          '/etc/hosts or DNS'
        )
  return ''


def run_mismatch(info: dict, first: dict) -> str:
  """The first difference in versions, config, command or code; '' if none.

  The two may compute on different platforms.
  """
  for kind in ('versions', 'config', 'command'):
    if key := _first_difference(info[kind], first[kind]):
      what = f'config.{key}' if kind == 'config' else key
      value, expected = info[kind].get(key), first[kind].get(key)
      return f'{name(info)} has {what} {value}, but {name(first)} has {expected}'
  if info['code'] != first['code']:
    return (
      f'{name(info)} runs other code than {name(first)}: the files of the package anp_jax differ'
    )
  if module := _first_difference(info['modules'], first['modules']):
    return f'{name(info)} has another {module} than {name(first)}: the files of the module differ'
  return ''


def devices(infos: list[dict]) -> tuple[list[list[int] | None], str]:
  """Assigns each process some of the GPUs that it sees.

  Args:
    infos: descriptions of all processes, by index, from `collect`.

  Returns:
    By process, ordinals among the GPUs that it sees (None: all local devices),
    and what is wrong, or ''.
  """
  ordinals: dict[int, list[int] | None] = {info['index']: None for info in infos}
  on_gpus = [info for info in infos if info['platform'] == 'gpu']
  first = next((info for info in on_gpus if info['gpus']), None)
  hosts: dict[str, list[dict]] = {}
  for info in on_gpus if first else ():
    if first and not info['gpus']:
      return list(ordinals.values()), f'{name(info)} sees no GPU, though {name(first)} does'
    hosts.setdefault(info['host'], []).append(info)
  problems = [_assign(group, ordinals) for group in hosts.values()]
  return list(ordinals.values()), next(filter(None, problems), '')


def assign_free_gpus(infos: list[dict]) -> None:
  """Assigns GPUs that are free to each process that has come to a run that goes on.

  It gets as many as the others have, which keep theirs.

  Args:
    infos: descriptions from `collect`; 'devices' is set where it is None.
  """
  used = {gpu for info in infos for i in info['devices'] or () for gpu in info['gpus'][i : i + 1]}
  count = max((len(info['devices']) for info in infos if info['devices']), default=0)
  for info in infos:
    if info['devices'] is None and info['gpus']:
      free = [i for i, gpu in enumerate(info['gpus']) if gpu not in used][: count or None]
      info['devices'], used = free, used | {info['gpus'][i] for i in free}


def gpus(environment: MutableMapping[str, str] = os.environ) -> list[str]:
  """The UUIDs of the GPUs that this process sees, in CUDA's order.

  The list is empty where NVIDIA's tool is missing.
  """
  text = xla_flags.nvidia_smi('--query-gpu=uuid', '--format=csv,noheader')
  uuids = [line.strip() for line in text.splitlines() if line.strip()]
  visible = environment.get('CUDA_VISIBLE_DEVICES')
  if visible is None or not uuids:
    return uuids
  result = []
  for word in (w.strip() for w in visible.split(',')):
    if word.isdigit():
      matches = uuids[int(word) : int(word) + 1]
    else:
      # CUDA takes the beginning of a UUID too; a MIG slice is not in the
      # list of whole GPUs.
      matches = [uuid for uuid in uuids if word and uuid.startswith(word)]
      matches = matches or [word] * word.startswith('MIG-')
    if not matches:  # CUDA sees nothing from here on
      break
    result += matches[:1]
  return result


def _assign(group, ordinals):
  """Divides a host's GPUs among its processes; returns what is wrong, or ''."""
  sets = [frozenset(info['gpus']) for info in group]
  if len(set(sets)) == 1 and len(group) > 1:
    each, rest = divmod(len(sets[0]), len(group))
    if rest or not each:
      return (
        f'{name(group[0])} and {len(group) - 1} more processes there all see '
        f'the same {len(sets[0])} GPUs, which do not divide by {len(group)}'
      )
    order = sorted(group, key=lambda c: (c['local_index'], c['index']))
    for i, info in enumerate(order):
      ordinals[info['index']] = list(range(i * each, (i + 1) * each))
    return ''
  for i, info in enumerate(group):
    for other, other_gpus in zip(group[:i], sets[:i]):
      shared = other_gpus & sets[i]
      if shared:
        return (
          f'{name(info)} sees GPU {min(shared)} of {name(other)} too: give '
          'each process its own (--gpus-per-task), or all of them to all '
          '(--gres)'
        )
    ordinals[info['index']] = list(range(len(info['gpus'])))
  return ''


def _slurm_gpus(environment):
  """The variable by which Slurm says that this job has GPUs, or ''."""
  for key, none in (
    ('SLURM_STEP_GPUS', ''),  # their indices: '0' is the first
    ('SLURM_JOB_GPUS', ''),
    ('SLURM_GPUS_ON_NODE', '0'),  # how many
  ):
    if environment.get(key, '') not in ('', none):
      return f'{key}={environment[key]}'
  return ''


def _name_is_loopback():
  """The loopback address that this host's own name resolves to, or ''."""
  try:
    addresses = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
  except OSError:
    return ''
  address = addresses[0][4][0]
  return address if re.match(r'127\.|::1$', address) else ''


def _first_difference(values, expected):
  """The first key whose values differ; '' if none."""
  keys = sorted(values.keys() | expected.keys())
  return next((key for key in keys if values.get(key) != expected.get(key)), '')


def _user_modules(config):
  """Digests of modules outside this package whose classes a config names.

  They are read and not imported: that may import JAX, or the package's own.
  """
  digests = {}
  for value in config_lib.flat(config).values():
    match = _CLASS.fullmatch(value) if isinstance(value, str) else None
    if match and not match[1].startswith('anp_jax.'):
      path = _module_path(match[1])
      if path:
        digests[match[1]] = hashlib.sha256(path.read_bytes()).hexdigest()
  return digests


def _module_path(module):
  """The file of a module that Python would import; None: there is none."""
  for folder in sys.path:
    place = pathlib.Path(folder or '.', *module.split('.'))
    for path in (place / '__init__.py', place.with_suffix('.py')):
      if path.is_file():
        return path
  return None


def _code():
  """A digest of this package's files: two checkouts must not train together."""
  root = pathlib.Path(__file__).resolve().parents[1]
  digest = hashlib.sha256()
  for path in sorted(root.rglob('*.py')):
    digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
  return digest.hexdigest()
