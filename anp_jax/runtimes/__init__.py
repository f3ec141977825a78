"""Strategies that start processes or threads of their own."""
