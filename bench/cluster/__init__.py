"""A Ray cluster of several nodes on this machine: what it scales to, and what it costs to come in through Ray Serve."""
