"""Networks in Flax and the layers they are built from."""

from typing import Any

import ml_collections

from anp_jax import config as config_lib
from anp_jax.config import emulation_keys, errors, networks, strategy as strategy_lib, trust
from anp_jax.system import cores, onednn

_CONVNETS = {
  'lenet': 'LeNet',
  'cifar10_full': 'Cifar10Full',
  'two_convolutions': 'TwoConvolutions',
  'caffenet': 'CaffeNet',
  'bvlc_alexnet': 'CaffeNet',
}


def has_batch_norm(config: ml_collections.ConfigDict) -> bool:
  """Whether the network may normalise over groups of examples."""
  name = config.model.name
  return ':' in name or name in networks.BATCH_NORMALISED


def target(config: ml_collections.ConfigDict, platform: str, devices: int = 1) -> str:
  """Returns the platform that layers are made for; sets oneDNN's threads.

  Args:
    config: the run's config; model.cpu_library is the library of a CPU.
    platform: platform of the mesh: 'cpu', 'gpu' or 'tpu'.
    devices: devices of this process, which compute at one time and share its
      cores.

  Returns:
    'cpu_onednn' for a CPU with oneDNN, else the platform.

  Raises:
    ConfigError: if the config asks for oneDNN and there is none to use.
  """
  is_xla = config.model.cpu_library == 'xla'
  if platform != 'cpu' or is_xla or emulation_keys.sleeps(config):
    return platform
  opened = onednn.find()
  if opened:
    # Bits depend on the number of threads. Where a strategy fixes that, any
    # number of devices shares any number of cores, and oneDNN's threads spin
    # while they wait for one that has no core (a norm by 8 threads on 2 cores
    # took 1.5 s, not 0.6 ms): so it computes with one thread there.
    is_fixed = 'threads' in strategy_lib.find(config).xla_settings(config)
    opened.threads = 1 if is_fixed else max(1, cores.count() // devices)
    return onednn.PLATFORM
  if config.model.cpu_library == 'onednn':
    reason = onednn.missing_reason() or (f'{onednn.VARIABLE}=off, or not Linux on x86-64')
    raise config_lib.ConfigError(
      f"config.model.cpu_library='onednn': there is no oneDNN to use: {reason}"
    )
  return platform


def create(
  config: ml_collections.ConfigDict, num_classes: int, platform: str, axis_name: str | None = None
) -> Any:
  """The network that config.model names, or one that emulates it.

  A user's module, `package.module:Class`, is a Flax module called
  with (images, train) that returns (batch, num_classes) numbers, which
  config.model.head reads: with joint the classes' logits. It is made with
  `num_classes=` and, where it has such fields, `dtype=`, `param_dtype=`,
  `platform=` and `axis_name=`, and with config.model.arguments.

  Args:
    config: the run's config.
    num_classes: number of outputs, see `objective.Objective.outputs`.
    platform: result of `target`; a user's network gets it as it is.
    axis_name: mesh axis that divides the batch, for global batch statistics.

  Returns:
    A flax.linen.Module, or an `emulated.Emulated` with its `init` and `apply`.

  Raises:
    ConfigError: if the user's module cannot be found or made.
  """
  network = _network(config, num_classes, platform, axis_name)
  if not emulation_keys.sleeps(config):
    return network
  from anp_jax.models import emulated

  return emulated.Emulated(network, config.emulate)


def _network(config, num_classes, platform, axis_name):
  m = config.model
  common = dict(
    num_classes=num_classes,
    dtype=m.dtype,
    param_dtype=m.param_dtype,
    platform=platform,
    axis_name=axis_name,
  )
  if ':' in m.name:
    from flax import linen as nn

    pairs = m.get('arguments', ())  # absent where a config of another network was changed
    trust.check_own('model.arguments', pairs, common)
    return trust.made('model.name', m.name, nn.Module, common, 'num_classes', dict(pairs))
  from anp_jax.models import airbench, convnets, convnext, efficientnet, linear, resnet

  if not has_batch_norm(config):
    del common['axis_name']  # there are no statistics to share
    if m.name in convnext.SIZES:
      version, stages, width = convnext.SIZES[m.name]
      return convnext.ConvNeXt(
        version=version, stages=stages, width=width, drop_path=m.drop_path, **common
      )
    if m.name == 'two_convolutions':
      common['kernels'] = tuple(m.kernels)
    if m.name in networks.CAFFENETS:
      common |= dict(norm_first=m.name == 'bvlc_alexnet', dropout=m.dropout)
    return getattr(convnets, _CONVNETS[m.name])(**common)
  norm = dict(group=m.norm_group, momentum=m.norm_momentum)
  if m.name == 'airbench94':
    return airbench.Airbench94(**norm, **common)
  if m.name == 'linear':
    return linear.Linear(**norm, **common)
  if m.name in efficientnet.NETWORKS:
    return efficientnet.EfficientNet(
      **efficientnet.NETWORKS[m.name], drop_path=m.drop_path, dropout=m.dropout, **norm, **common
    )
  fields = resnet.NETWORKS[m.name]
  least = resnet.least_width(fields)
  errors.check(m.width >= least, 'model.width', m.width, f'at least {least} for {m.name}')
  return resnet.ResNet(
    **fields, width=m.width, version=m.version, zero_init=m.zero_init, **norm, **common
  )
