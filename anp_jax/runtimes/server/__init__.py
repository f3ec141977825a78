"""Asynchronous training: workers push gradients to servers and pull weights.

`layout` and `shard` compute, `desk` decides, `keeper` holds one server's slice,
`wire` and `service` carry, `worker` and `run` are the processes, `log` and
`replay` the proof. docs/strategies.md says what it is for.
"""
