"""ResNets: their published names, and what network a file holds."""

from collections.abc import Iterable
import re
from typing import Any

import ml_collections

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import naming
from anp_jax.config import networks


class ResNet(naming.Family):
  """The family of `models.resnet`."""

  name = 'ResNet'
  models = networks.RESNETS
  signature = ('stem_conv|stem_conv3', 'stem_norm', 'stage1_block1/conv1')

  def network(self, path: str, shapes: dict, kind: str, saved_config: dict) -> dict:
    """Returns the values of the config; see `naming.Family`."""
    from anp_jax.models import resnet  # heavy: it imports JAX

    width, fields = self.variant(shapes, kind)
    models = [name for name, n in resnet.NETWORKS.items() if n == fields]
    if not models:
      raise config_lib.ConfigError(
        f'config.init.from={path!r} holds a network of '
        f'{self.describe(shapes, kind)}: expected one of {", ".join(self.models)}'
      )
    for key, value in (('downsample_in_first_stage', False), ('hidden_act', 'relu')):
      if saved_config.get(key, value) != value:
        raise config_lib.ConfigError(
          f'config.init.from={path!r}: its config.json has '
          f'{key}={saved_config[key]!r}, and this package has ResNets of {value!r} only'
        )
    first = saved_config.get('downsample_in_bottleneck')
    return {
      'model.name': models[0],
      'model.version': 'v1' if first and fields['bottleneck'] else 'v1.5',
      'model.width': width,
      'model.head': 'joint',
    }

  def mismatch(
    self, config: ml_collections.ConfigDict, paths: Iterable[str], kind: str, saved_config: dict
  ) -> str:
    """Returns why it is another, see `naming.Family`; no tensor tells where a block strides."""
    m = config.model
    if kind != naming.TRANSFORMERS:
      return ''
    if any(re.search('/stem_conv1|/pooled_|/se_', path) for path in paths):
      return f'has the tensors of a ResNet of transformers, which has no {m.name}'
    if saved_config.get('layer_type', 'bottleneck') != 'bottleneck':
      return ''
    version = 'v1' if saved_config.get('downsample_in_bottleneck') else 'v1.5'
    if saved_config.get('model_type') == 'resnet' and m.version != version:
      return f'holds a ResNet of version {version!r}, but config.model.version={m.version!r}'
    return ''

  def architecture(self, config: ml_collections.ConfigDict) -> dict:
    """Returns the fields of transformers' config that say what network it is."""
    from anp_jax.models import resnet

    m = config.model
    network = resnet.NETWORKS[m.name]
    stages, bottleneck = network['stages'], network['bottleneck']
    return {
      'architectures': ['ResNetForImageClassification'],
      'model_type': 'resnet',
      'embedding_size': m.width,
      'hidden_sizes': [m.width * (4 if bottleneck else 1) * 2**i for i in range(len(stages))],
      'depths': list(stages),
      'layer_type': 'bottleneck' if bottleneck else 'basic',
      'hidden_act': 'relu',
      'downsample_in_first_stage': False,
      'downsample_in_bottleneck': m.version == 'v1',
    }

  def describe(self, names: Iterable[str], kind: str) -> str:
    """Returns what network a file holds, for people."""
    names = list(names)
    return f'{super().describe(names, kind)} of {self._layers(names, kind)} convolutions'

  def variant(self, shapes: dict[str, tuple[int, ...]], kind: str) -> tuple[int, dict]:
    """Returns the width of a network, and its fields in `models.resnet.NETWORKS`.

    Args:
      shapes: shapes of the tensors by their published names.
      kind: naming of the tensors.
    """
    layers = self._layers(shapes, kind)
    ours = {
      module: shapes[name]
      for name in shapes
      for module in self.namings[kind].modules([name])
      if name.endswith('weight')
    }
    is_deep = 'stem_conv3' in ours
    stem = ours['stem_conv3' if is_deep else 'stem_conv']
    fields: dict[str, Any] = dict(stages=self.blocks(shapes, kind), bottleneck=layers == 3)
    if is_deep:
      fields |= dict(stem='deep', shortcut='pooled')
    elif stem[-1] == 3:
      fields |= dict(stem='small', shortcut='padding')
    if 'stage1_block1/se_fc1' in ours:
      fields['squeeze'] = 16
    inner = ours.get('stage1_block1/conv2', ())
    if layers == 3 and len(inner) == 4 and stem[0] * inner[1]:
      groups = inner[0] // inner[1]
      group_width = 64 * inner[1] // stem[0]
      if groups > 1:
        fields['groups'] = groups
      if (groups, group_width) != (1, 64):
        fields['group_width'] = group_width
    return stem[0], fields

  def _layers(self, names, kind):
    """Convolutions of a block."""
    modules = self.namings[kind].modules(names)
    return len({m for m in modules if m.startswith('stage1_block1/conv')})
