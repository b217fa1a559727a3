"""Speculation over a long line: drafter and orchestrator here, the verifier behind `bench.relay`.

places, rig          namespaces for edge and cloud; the processes of a cell
cells, traces        the grid, the sixteen cells measured, and where their drafter is right
virtual              what the simulator expects of a cell
disciplines          plain, textbook, streaming with a waiting verifier, the default; their ratios
emulated, real_pair  measured over real sockets: sleeping devices, and the demo pair
wire                 bytes by hop and kind
judged               what is needed, and whether it holds
results, report, plot, run
"""
