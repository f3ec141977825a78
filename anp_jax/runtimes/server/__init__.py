"""Asynchronous training: workers push gradients to servers and pull weights.

`layout` and `slice_optimizer` compute, `scheduler` decides, `parameter_store`
holds one server's slice, `service` carries it, `worker`, `chief`, `secondary`
and `run` are the processes, `log` and `replay` the proof. docs/strategies.md
says what it is for.
"""
