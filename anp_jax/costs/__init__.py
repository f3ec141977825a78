"""Predicted costs of a step on devices and links of other machines."""
