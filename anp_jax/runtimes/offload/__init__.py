"""Devices outside the mesh that compute channels of convolutions."""
