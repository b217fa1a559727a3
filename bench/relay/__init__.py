"""A line of our own between two processes: delay, jitter, bandwidth, stalls and cuts, in user space.

relay  the process
way    one direction of a connection
frames what HTTP/2 carries in it, counted
link   the process as its owner sees it
gauge  what the relay itself costs
"""
