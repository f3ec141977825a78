"""The commands of an installed package, such as anp-train.

A module that `python -m` runs calls its command here before its own imports, and the
command ends the process. Modules are imported after the handler of Ctrl-C is
installed, so that Ctrl-C always ends a command with one line; a study waits for its
processes on Ctrl-C, and the planner has no handler.
"""

import functools
import importlib
import sys

from anp_jax.system import interrupts


def _start(module, **arguments):
  """Runs a module's command, with the handler of Ctrl-C installed first."""
  interrupts.install()
  _run(module, **arguments)


def _compute(module, **arguments):
  """Runs a module's command with huge pages, for which the process may restart."""
  interrupts.install()
  from anp_jax.system import xla_flags

  xla_flags.use_huge_pages()
  _run(module, **arguments)


def _run(module, **arguments):
  """Ends with the status of a module's main function, unless it has a `command` that does more."""
  imported = importlib.import_module(module)
  if hasattr(imported, 'command'):
    imported.command(**arguments)
  else:
    interrupts.listen()
    interrupts.exit(imported.main(sys.argv))


train = functools.partial(_compute, 'anp_jax.__main__')
evaluate = functools.partial(_compute, 'anp_jax.__main__', mode='evaluate')
predict = functools.partial(_compute, 'anp_jax.predict.__main__')
prepare = functools.partial(_start, 'anp_jax.data.prepare.__main__')
show = functools.partial(_start, 'anp_jax.data.show.__main__')
export = functools.partial(_start, 'anp_jax.export')
compare = functools.partial(_start, 'anp_jax.tools.compare.__main__')
top = functools.partial(_start, 'anp_jax.tools.top')
study = functools.partial(_run, 'anp_jax.tools.study.__main__')
plan = functools.partial(_run, 'anp_jax.tools.plan.__main__')
