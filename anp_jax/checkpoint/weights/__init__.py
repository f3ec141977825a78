"""Weights that come from elsewhere, and go there."""
