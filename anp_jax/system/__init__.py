"""The process, its machine and its files."""
