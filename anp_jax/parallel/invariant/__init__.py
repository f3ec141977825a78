"""Synchronous training with the same bits on any number of devices."""
