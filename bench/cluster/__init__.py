"""A Ray cluster of several nodes on this machine, and how it scales: `make bench-cluster`.

run     the command: python -m bench.cluster.run; all rows in turn, what is needed, the record
load    the rows, the sessions, the deployment, what the simulator expects
clocks  processor time by kind of process
site    the cluster itself, for tests too
"""
