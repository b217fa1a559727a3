"""A line of our own between two processes: delay, jitter, bandwidth, stalls and cuts, in user space.

relay  the process, and one direction of a connection
frames what HTTP/2 carries in it, counted
link   the process as its owner sees it
"""
