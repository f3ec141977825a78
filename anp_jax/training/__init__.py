"""A training step: loss, gradient, update, and the same without them."""
