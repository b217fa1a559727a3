"""A Ray cluster of several nodes on this machine: how it scales, and what Ray Serve as the way in costs."""
