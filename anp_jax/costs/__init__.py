"""Arithmetic of what a step costs on devices and links that are not here."""
