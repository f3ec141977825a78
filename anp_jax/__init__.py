"""anp_jax: image classifiers trained on clusters with JAX."""
