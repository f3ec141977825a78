"""Asynchronous training: workers push gradients to servers and pull weights.

`layout` and `slice_optimizer` compute, `scheduler` decides, `parameter_store`
holds one server's slice, `session` and `service` offer it to `gradient_worker`,
`chief` and `secondary`, which `parameter_server_run` starts. `log` is what
`tools.trials.replay` computes a run from again. Where workers are simulated, the
ordinary loop trains with `delayed_step`, in the order of `simulation` and its
`timeline`. docs/strategies.md tells when to use it.
"""
