"""timm's networks, without torchvision.

timm imports torchvision, whose builds load with few builds of torch only; the
networks use nothing of it, so timm is imported with a stand-in for it.
"""

import importlib.abc
import importlib.machinery
import sys
from unittest import mock


def create(model_name: str, **arguments):
  """Returns timm.create_model(model_name, **arguments)."""
  with mock.patch.object(sys, 'meta_path', [_StandIn(), *sys.meta_path]):
    import timm
  # Others look for torchvision, too, and are to find that it is not here.
  for name in [name for name in sys.modules if isinstance(sys.modules[name], mock.MagicMock)]:
    del sys.modules[name]
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
