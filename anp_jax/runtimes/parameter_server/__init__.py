"""Asynchronous training: workers push gradients to servers and pull weights.

`layout` and `slice_optimizer` compute, `scheduler` decides, `parameter_store`
holds one server's slice, `session` and `service` offer it to `worker`, `chief`
and `secondary`, which `run` starts; `log` and `replay` are the proof.
docs/strategies.md says what it is for.
"""
