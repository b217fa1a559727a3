"""Speed, measured side by side: the plain target, assisted generation, and this system, interleaved on the same cores.

run         the command: python -m bench.run
runs        what one timed generation yields
child       a process of ours that answers in lines of JSON
peer        the process in which transformers runs
rows        the rows: transformers' in the peer, specwire's through its own stack
interleave  which row runs when
interval    medians with their confidence intervals, percentiles
gaps        where time goes between forwards, and from a forward to the client
texts       do all rows say the same, token for token
bars        what is needed, and whether it holds
report      the table, and bench/results/main.json
plot        bench/results/main.png
machine     what it ran on

dtypes         bfloat16 and 8-bit weights beside float32: python -m bench.dtypes
deterministic  what --deterministic keeps equal and costs: python -m bench.deterministic
mixes          sessions alone and in random mixes, over two engines
"""
