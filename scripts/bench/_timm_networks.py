"""timm's networks, without torchvision.

timm imports torchvision, whose builds load with few builds of torch only; the
networks use nothing of it, so a process that makes one has a stand-in for it.
"""

import importlib.abc
import importlib.machinery
import sys
from unittest import mock


def create(model_name: str, **arguments):
  """Returns timm.create_model(model_name, **arguments)."""
  if not any(isinstance(f, _StandIn) for f in sys.meta_path):
    sys.meta_path.insert(0, _StandIn())
  import timm

  return timm.create_model(model_name, **arguments)


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Finds mocks for torchvision and all of its modules."""

  def find_spec(self, name, path=None, target=None):
    if name.split('.')[0] == 'torchvision':
      return importlib.machinery.ModuleSpec(name, self, is_package=True)
    return None

  def create_module(self, spec):
    return mock.MagicMock(
      name=spec.name, __path__=[], __spec__=spec, __name__=spec.name, __version__='0.28.0'
    )

  def exec_module(self, module):
    pass
