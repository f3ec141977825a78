"""Preparation of a folder of images: examined, repaired, in few files."""
