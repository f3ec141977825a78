"""The commands of an installed package, such as anp-train.

Each calls a module's `command`, as `python -m` does. Modules are imported after
the handler of Ctrl-C is installed, so that Ctrl-C always ends a command with one
line; a study waits for its processes on Ctrl-C, and the planner has no handler.
"""

import importlib

from anp_jax.system import interrupts


def train() -> None:
  """Trains: `python main.py`."""
  _start('anp_jax.__main__')


def evaluate() -> None:
  """Evaluates a run: `python main.py --mode=evaluate`."""
  _start('anp_jax.__main__', mode='evaluate')


def predict() -> None:
  """Names images: `python -m anp_jax.predict`."""
  _start('anp_jax.predict.__main__')


def prepare() -> None:
  """Prepares a data set: `python -m anp_jax.data.prepare`."""
  _start('anp_jax.data.prepare.__main__')


def show() -> None:
  """Shows a data set: `python -m anp_jax.data.show`."""
  _start('anp_jax.data.show.__main__')


def export() -> None:
  """Exports a trained network: `python -m anp_jax.export`."""
  _start('anp_jax.export')


def compare() -> None:
  """Compares runs: `python -m anp_jax.tools.compare`."""
  _start('anp_jax.tools.compare.__main__')


def study() -> None:
  """Compares ways of training: `python -m anp_jax.tools.study`."""
  importlib.import_module('anp_jax.tools.study.__main__').command()


def plan() -> None:
  """Predicts how a training scales: `python -m anp_jax.tools.plan`."""
  importlib.import_module('anp_jax.tools.plan.__main__').command()


def _start(module, **arguments):
  """Runs a module's command, with the handler of Ctrl-C installed first."""
  interrupts.install()
  importlib.import_module(module).command(**arguments)
