"""A Ray cluster of several nodes on this machine, and how it scales: `make bench-cluster`.

run     the command: python -m bench.cluster.run; all rows in turn, what is needed, the record
load    the rows, the sessions, the deployment, what the simulator expects
site    the cluster itself, for tests too, and its processes' time by what they are
"""
