"""`python -m scripts.study`, now `python -m anp_jax.study` or anp-study."""

import runpy

if __name__ == '__main__':
  runpy.run_module('anp_jax.study', run_name='__main__')
