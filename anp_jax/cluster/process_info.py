"""What each process shows the others before they start, and what must agree."""

import hashlib
import importlib.metadata
import os
import pathlib
import platform as platform_lib
import re
import socket
import subprocess

from anp_jax import config as config_lib
from anp_jax.system import xla_flags

_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint')


def collect(env, config, command: dict, environment=os.environ) -> dict:
  """This process's card: JSON values only; JAX is not imported.

  Args:
    env: of this process.
    config: the run's config.
    command: what else all must have been told alike, by name.
    environment: variables.
  """
  here = xla_flags.platform(environment)
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  python = platform_lib.python_version_tuple()
  return {
    'index': env.index,
    'count': env.count,
    'token': env.token,
    'host': socket.gethostname(),
    'local_index': env.local_index,
    'platform': here,
    'problem': startup_problem(environment),
    'gpus': gpus(environment) if here == 'gpu' else [],
    'loopback': _name_is_loopback(),
    'versions': {'Python': '.'.join(python[:2]), **versions},
    'code': _code(),
    'config': {k: repr(v) for k, v in config_lib.flat(config).items()},
    'command': command,
  }


def startup_problem(environment=os.environ) -> str:
  """What keeps this process alone from starting; '' if nothing."""
  given = _slurms_gpus(environment)
  here = xla_flags.platform(environment)
  if not given or here == 'gpu' or environment.get('JAX_PLATFORMS'):
    return xla_flags.missing_plugin(environment)
  hidden = environment.get('CUDA_VISIBLE_DEVICES')
  why = (
    f'CUDA_VISIBLE_DEVICES={hidden!r} hides them'
    if hidden is not None and hidden.strip() in ('', '-1')
    else 'JAX has no CUDA here: make setup ACCELERATOR=cuda13, or check '
    'that the driver is loaded'
  )
  return (
    f'Slurm gave this job GPUs ({given}), but JAX would compute on {here}: '
    f'{why}; JAX_PLATFORMS=cpu if that is meant'
  )


def name(card: dict) -> str:
  """'rank 1 on node2'."""
  return f'rank {card["index"]} on {card["host"]}'


def first_mismatch(cards: list[dict]) -> str:
  """The first thing that keeps these processes from starting; '' if nothing.

  Args:
    cards: of all processes, by index.
  """
  for card in cards:
    if card['problem']:
      return f'{name(card)}: {card["problem"]}'
  first = cards[0]
  for card in cards[1:]:
    text = run_mismatch(card, first)
    if text:
      return text
    if card['platform'] != first['platform'] and not _may_differ(first):
      return (
        f'{name(card)} would compute on {card["platform"]}, '
        f'{name(first)} on {first["platform"]}'
      )
  if len({card['host'] for card in cards}) > 1 and first['platform'] == 'cpu':
    for card in cards:
      if card['loopback']:
        return (
          f'{name(card)}: its own name resolves to {card["loopback"]}, '
          'where no other host finds it; give it its real address in '
          '/etc/hosts or DNS'
        )
  return devices(cards)[1]


def run_mismatch(card: dict, first: dict) -> str:
  """Which of its versions, config, command or code is another; '' if none.

  On what the two compute is not looked at.
  """
  for kind in ('versions', 'config', 'command'):
    text = _difference(kind, card, first)
    if text:
      return text
  if card['code'] != first['code']:
    return (
      f'{name(card)} runs other code than {name(first)}: the files of the '
      'package anp_jax differ'
    )
  return ''


def _may_differ(card):
  """Whether processes may compute on unlike platforms: one helps another."""
  helpers = card['config'].get('strategy.helpers', '()')
  return helpers != '()' and card['command'].get('--mode') == 'train'


def devices(cards: list[dict]) -> tuple[list[list[int] | None], str]:
  """Which of the GPUs that it sees each process takes.

  Returns:
    By process, ordinals among the GPUs that it sees (None: all local devices),
    and what is wrong, or ''.
  """
  taken = [None] * len(cards)
  hosts = {}
  for card in cards:
    hosts.setdefault(card['host'], []).append(card)
  seeing = [card for card in cards if card['gpus']]
  if not seeing:
    return taken, ''
  for card in cards:
    if not card['gpus']:
      return taken, f'{name(card)} sees no GPU, though {name(seeing[0])} does'
  problems = (_share(group, taken) for group in hosts.values())
  return taken, next(filter(None, problems), '')


def gpus(environment=os.environ) -> list[str]:
  """Identities of the GPUs that this process sees, in CUDA's order.

  Empty where NVIDIA's tool is missing: then nothing is known.
  """
  try:
    text = subprocess.run(
      ['nvidia-smi', '--query-gpu=uuid', '--format=csv,noheader'],
      capture_output=True, text=True, timeout=30, check=True,
    ).stdout  # fmt: skip
  except (OSError, subprocess.SubprocessError):
    return []
  every = [line.strip() for line in text.splitlines() if line.strip()]
  visible = environment.get('CUDA_VISIBLE_DEVICES')
  if visible is None:
    return every
  found = []
  for word in (w.strip() for w in visible.split(',')):
    if word.isdigit():
      match = every[int(word) : int(word) + 1]
    else:
      # CUDA takes the beginning of an identity too; a MIG slice is not in the
      # list of whole GPUs.
      match = [uuid for uuid in every if word and uuid.startswith(word)]
      match = match or [word] * word.startswith('MIG-')
    if not match:  # CUDA sees nothing from here on
      break
    found += match[:1]
  return found


def _share(group, taken):
  """Divides a host's GPUs among its processes; returns what is wrong, or ''."""
  sets = [frozenset(card['gpus']) for card in group]
  if len(set(sets)) == 1 and len(group) > 1:
    each, rest = divmod(len(sets[0]), len(group))
    if rest or not each:
      return (
        f'{name(group[0])} and {len(group) - 1} more processes there all see '
        f'the same {len(sets[0])} GPUs, which do not divide by {len(group)}'
      )
    order = sorted(group, key=lambda c: (c['local_index'], c['index']))
    for i, card in enumerate(order):
      taken[card['index']] = list(range(i * each, (i + 1) * each))
    return ''
  for i, card in enumerate(group):
    for other, seen in zip(group[:i], sets[:i]):
      both = seen & sets[i]
      if both:
        return (
          f'{name(card)} sees GPU {min(both)} of {name(other)} too: give each '
          'process its own (--gpus-per-task), or all of them to all (--gres)'
        )
    taken[card['index']] = list(range(len(card['gpus'])))
  return ''


def _slurms_gpus(environment):
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
    found = socket.getaddrinfo(
      socket.gethostname(), None, type=socket.SOCK_STREAM
    )
  except OSError:
    return ''
  address = found[0][4][0]
  return address if re.match(r'127\.|::1$', address) else ''


def _difference(kind, card, first):
  ours, theirs = card[kind], first[kind]
  for key in sorted(ours.keys() | theirs.keys()):
    if ours.get(key) != theirs.get(key):
      what = f'config.{key}' if kind == 'config' else key
      return (
        f'{name(card)} has {what} {ours.get(key)}, but {name(first)} has '
        f'{theirs.get(key)}'
      )
  return ''


def _code():
  """A digest of this package's files: two checkouts must not train together."""
  root = pathlib.Path(__file__).resolve().parents[1]
  digest = hashlib.sha256()
  for path in sorted(root.rglob('*.py')):
    digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
  return digest.hexdigest()
