"""Machines to compile for that need not be here.

Nothing heavy is imported before `devices`: a mistyped target is refused at once,
and variables that JAX reads when it starts can still be set.
"""

from collections.abc import MutableMapping, Sequence
import dataclasses
import importlib.util
import math
import os
import pathlib
import re

import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import errors
from anp_jax.system import xla_flags

_HERE = pathlib.Path(__file__).resolve().parent
_FORMS = {'cpu': 'cpu:N', 'gpu': 'gpu:CARD:HOSTSxGPUS', 'tpu': 'tpu:GENERATION:TOPOLOGY'}
_EXAMPLES = ('cpu:8', 'gpu:h200:16x4', 'tpu:v5e:2x2', 'tpu:v6e:4x4')
# Generations that libtpu knows; whether a topology exists it says itself.
GENERATIONS = ('v2', 'v3', 'v4', 'v5e', 'v5p', 'v6e', 'tpu7x')
# A platform's modules, and JAX's extra that installs one at JAX's version.
# `-local` leaves NVIDIA's libraries out: none is needed.
_PLUGINS = {
  'tpu': (('libtpu',), 'tpu'),
  'gpu': (('jax_cuda13_plugin', 'jax_cuda12_plugin'), 'cuda13-local'),
}
_LARGEST = 2**16  # devices; more is a typing mistake


class CompilerMissingError(RuntimeError):
  """The plugin of a target is not installed; one line says what to install."""


@dataclasses.dataclass(frozen=True)
class Target:
  """Devices of one kind.

  Attributes:
    text: text as typed.
    platform: 'cpu', 'gpu' or 'tpu'.
    kind: card or generation; '' for cpu.
    counts: number of devices; or of hosts and GPUs in each; or of chips along each axis.
  """

  text: str
  platform: str
  kind: str
  counts: tuple[int, ...]


def parse(text: str) -> Target:
  """Returns the target of a text.

  Raises:
    ConfigError: naming the text, the forms there are and the nearest one.
  """
  platform, *rest = text.split(':')
  if platform not in _FORMS:
    raise config_lib.ConfigError(
      f'--target={text!r}: expected {", ".join(_FORMS.values())}'
      f'{config_lib.nearest(text, _EXAMPLES)}'
    )
  kind = rest.pop(0) if platform != 'cpu' and rest else ''
  cards = tuple(sorted(p.stem for p in _HERE.glob('*.txtpb')))  # described next to this file
  kinds = {'cpu': ('',), 'gpu': cards, 'tpu': GENERATIONS}[platform]
  errors.check_choice(f'--target={text!r}: {kind!r}', kind, kinds)
  axes = {'cpu': (1,), 'gpu': (2,), 'tpu': (2, 3)}[platform]
  sizes = rest[0] if len(rest) == 1 else ''
  counts: tuple[int, ...] = ()
  if re.fullmatch(r'\d{1,5}(?:x\d{1,5})*', sizes):
    counts = tuple(int(n) for n in sizes.split('x'))
  if not 0 < math.prod(counts) <= _LARGEST or len(counts) not in axes:
    examples = [e for e in _EXAMPLES if e.startswith(platform)]
    raise config_lib.ConfigError(
      f'--target={text!r}: expected {_FORMS[platform]}, such as {examples[0]!r}'
    )
  return Target(text, platform, kind, counts)


def check_plugin(target: Target) -> None:
  """Raises CompilerMissingError where a target's compiler is not installed."""
  if target.platform not in _PLUGINS:
    return
  modules, extra = _PLUGINS[target.platform]
  if not any(importlib.util.find_spec(m) for m in modules):
    raise CompilerMissingError(
      f'{modules[0]} is not installed: '
      f"pip install 'jax[{extra}]', or make portability, which has its own "
      'environment'
    )


def prepare(
  target: Target,
  config: ml_collections.ConfigDict,
  environment: MutableMapping[str, str] = os.environ,
) -> None:
  """Sets XLA's variables as a run on the target would, before JAX is imported.

  Args:
    target: target to compile for.
    config: config of the run.
    environment: variables to set.
  """
  environment['JAX_PLATFORMS'] = target.platform
  xla_flags.enable_for(config, environment)
  # Compiled for the target, but nothing here is asked for such a device.
  environment['JAX_PLATFORMS'] = 'cpu'
  environment['TPU_SKIP_MDS_QUERY'] = '1'
  # No TPU is opened, so that no other process's is in danger.
  environment['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
  # A program from the cache would not be compiled now.
  environment['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
  if target.platform == 'cpu':
    environment['JAX_NUM_CPU_DEVICES'] = str(target.counts[0])


def devices(target: Target) -> Sequence:
  """Returns devices for a mesh, without the machine.

  Raises:
    CompilerMissingError: if the plugin is not installed.
    ConfigError: for fewer CPU devices than JAX was told of.
    RuntimeError: for a topology that the plugin does not know.
  """
  check_plugin(target)
  import jax
  from jax.experimental import topologies

  if target.platform == 'cpu':
    cpus = jax.devices('cpu')[: target.counts[0]]
    if len(cpus) < target.counts[0]:
      raise config_lib.ConfigError(f'{target.text}: JAX was started with {len(cpus)} CPU devices')
    return cpus
  if target.platform == 'tpu':
    sizes = 'x'.join(str(n) for n in target.counts)
    return topologies.get_topology_desc(
      platform='tpu', topology_name=f'{target.kind}:{sizes}'
    ).devices
  hosts, gpus = target.counts
  return topologies.get_topology_desc(
    platform='cuda',
    target_config=(_HERE / f'{target.kind}.txtpb').read_text(),
    topology=f'1x{hosts}x{gpus}',  # partitions x hosts x GPUs
  ).devices
