"""Trials of a config on the machine at hand; no checkpoint is read or made."""
