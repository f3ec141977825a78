"""What the devices take for a split convolution, and the plan made of it."""
