"""Synchronous training: every gradient in every update."""
