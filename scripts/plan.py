"""`python -m scripts.plan`, now `python -m anp_jax.plan` or anp-plan."""

import runpy

if __name__ == '__main__':
  runpy.run_module('anp_jax.plan', run_name='__main__')
