"""The commands of an installed package: anp-train and the others.

Each is a module's `command`, as `python -m` starts it. Ctrl-C ends them in one
line from the start, so that modules are imported only after that; a study waits
for its processes on Ctrl-C, and a planner has no handler of its own.
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
  """Runs a module's command; Ctrl-C is answered before it is imported."""
  interrupts.install()
  importlib.import_module(module).command(**arguments)
