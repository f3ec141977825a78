"""Periodic averaging: groups of devices with weights of their own."""
