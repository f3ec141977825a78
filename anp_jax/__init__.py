"""anp_jax: image classifiers trained on clusters with JAX."""

__version__ = '0.1.0'
