"""CaffeNets: Caffe's names, and which of two networks a file holds."""

from collections.abc import Iterable

import ml_collections

from anp_jax.checkpoint.weights import naming
from anp_jax.config import networks


class CaffeNet(naming.Family):
  """The family of `models.convnets.CaffeNet`, whose files `caffe_file` reads."""

  name = 'CaffeNet'
  models = networks.CAFFENETS
  signature = ('conv5', 'fc6', 'fc7')

  def network(self, path: str, shapes: dict, kind: str, saved_config: dict) -> dict:
    """Returns the values of the config; see `naming.Family`."""
    del path, shapes, kind
    return {'model.name': saved_config['architecture'], 'model.head': 'joint'}

  def mismatch(
    self, config: ml_collections.ConfigDict, paths: Iterable[str], kind: str, saved_config: dict
  ) -> str:
    """Returns why it is another, see `naming.Family`; no tensor tells where it normalises."""
    del paths, kind
    name, other = config.model.name, saved_config['architecture']
    return '' if name == other else f'holds a {other}, but config.model.name={name!r}'
