"""The pure core: no clock, no randomness, no I/O. The same events give the same effects, here and in the simulator."""
