"""Addresses of commands as they were before runtimes/; see runtimes."""
