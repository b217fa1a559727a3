"""specwire on a Ray cluster: the wanted state from a file, the actual state, and the way from one to the other."""
