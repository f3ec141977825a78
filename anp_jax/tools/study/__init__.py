"""Studies that compare ways of spreading a training."""
