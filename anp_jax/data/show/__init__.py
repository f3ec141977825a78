"""What the network gets to see of a data set."""
