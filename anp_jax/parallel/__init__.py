"""Devices, the state on them, and the strategies of one step."""
