"""Naming image files with a trained network, from paths to a table."""
