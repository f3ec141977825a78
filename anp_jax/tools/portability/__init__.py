"""Compiles steps for machines that are not here."""
