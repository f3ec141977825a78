"""Published figures, and ours."""
