"""`python -m anp_jax.strategies.server.replay`, now anp_jax.runtimes."""

import runpy

if __name__ == '__main__':
  runpy.run_module('anp_jax.runtimes.server.replay', run_name='__main__')
