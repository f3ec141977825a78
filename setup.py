"""Adds configs/ to the package, as anp_jax.recipes; see pyproject.toml."""

import setuptools

setuptools.setup(
  packages=[*setuptools.find_packages(include=['anp_jax*']), 'anp_jax.recipes'],
  package_dir={'anp_jax.recipes': 'configs'},
)
