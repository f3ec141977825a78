"""`python -m scripts.portability`, now `python -m anp_jax.portability`."""

import runpy

if __name__ == '__main__':
  runpy.run_module('anp_jax.portability', run_name='__main__')
