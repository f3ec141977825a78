"""Checkpoints, and weights from elsewhere."""
