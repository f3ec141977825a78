"""A strategy from outside the package: sign-SGD by majority vote.

Each device sends the signs of its gradients, and all apply the sign of their
sum (Bernstein et al., "signSGD with majority vote", ICLR 2019).
"""

from anp_jax.parallel.sync import sync_strategy as sync


class SignSgd(sync.Sync):
  """Synchronous training in which only signs travel."""

  state = 'single'  # it resumes checkpoints of `sync`, which resumes its own

  def build(self, config, specs, forward_order=(), offload_devices=()):
    """What happens to the gradients inside a step."""
    import jax
    import jax.numpy as jnp

    from anp_jax.parallel.sync import sync_step

    class SignStep(sync_step.SyncStep):
      """Sums signs over the devices."""

      def reduce(self, gradients, metrics):
        signs = jax.tree.map(jnp.sign, gradients)
        votes, metrics = super().reduce(signs, metrics)
        examples = metrics[1]  # the update divides by it
        return jax.tree.map(lambda v: jnp.sign(v) * examples.astype(v.dtype), votes), metrics

    return SignStep(config, specs, forward_order)
