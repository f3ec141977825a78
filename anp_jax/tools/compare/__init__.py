"""`python -m anp_jax.tools.compare`: runs side by side, on one page."""
