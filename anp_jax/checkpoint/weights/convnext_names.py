"""ConvNeXts: their published names, and what network a file holds."""

from collections.abc import Iterable

import ml_collections

from anp_jax import config as config_lib
from anp_jax.checkpoint.weights import naming
from anp_jax.config import networks


class ConvNeXt(naming.Family):
  """The family of `models.convnext`."""

  name = 'ConvNeXt'
  models = networks.CONVNEXTS
  signature = ('stem_conv', 'stage1_block1/depthwise')

  def describe(self, names: Iterable[str], kind: str) -> str:
    """Returns what network a file holds, for people."""
    names = list(names)
    return f'{super().describe(names, kind)} of ConvNeXt V{self._version(names)}'

  def network(self, path: str, shapes: dict, kind: str, saved_config: dict) -> dict:
    """Returns the values of the config; see `naming.Family`."""
    from anp_jax.models import convnext  # heavy: it imports JAX

    suffix = self.namings[kind].published('params/stem_conv/kernel')
    stem = next(shape for name, shape in shapes.items() if name.endswith(suffix))
    size = (self._version(shapes), self.blocks(shapes, kind), stem[0])
    activation = saved_config.get('hidden_act', 'gelu')
    for name, row in convnext.SIZES.items():
      if row == size and activation == 'gelu' and stem[2:] == (4, 4):
        return {'model.name': name, 'model.head': 'joint'}
    raise config_lib.ConfigError(
      f'config.init.from={path!r} holds a network of '
      f'{self.describe(shapes, kind)} with {stem[0]} channels, {activation} and '
      f'patches of {stem[2]}: expected one of {", ".join(self.models)}'
    )

  def architecture(self, config: ml_collections.ConfigDict) -> dict:
    """Returns the fields of transformers' config that say what network it is."""
    from anp_jax.models import convnext

    version, stages, width = convnext.SIZES[config.model.name]
    suffix = 'V2' if version == 2 else ''
    return {
      'architectures': [f'ConvNext{suffix}ForImageClassification'],
      'model_type': f'convnext{suffix.lower()}',
      'patch_size': 4,
      'num_stages': len(stages),
      'hidden_sizes': [width * 2**i for i in range(len(stages))],
      'depths': list(stages),
      'hidden_act': 'gelu',
      'layer_norm_eps': convnext.EPSILON,
      'image_size': config.data.image_size,
    }

  def _version(self, names):
    return 2 if any('.grn.' in name for name in names) else 1
