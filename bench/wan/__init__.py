"""Speculation over a long line: drafter and orchestrator here, the verifier behind `bench.relay`.

rig                  the processes of a cell, relays between edge and cloud
cells, traces        the grid, the sixteen cells measured, and where their drafter is right
virtual              what the simulator expects of a cell
disciplines          plain, textbook, streaming with a waiting verifier, the default; their ratios
emulated             measured over real sockets, with devices that sleep
wire                 bytes by hop and kind
report               what is needed, the record
run                  the command: python -m bench.wan.run

Real forwards over a line are in `make bench-real`.
"""
