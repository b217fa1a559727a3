"""specwire on a Ray cluster: what a file wants, what is there, and the way from one to the other."""
