"""Input: from files to device arrays, a pure function of (seed, step)."""
