"""Many sessions at once: drafting off, on and automatic, beside transformers' static and continuous batching.

run        the command: python -m bench.batch.run
settings   what to measure, and the command line that says so
measure    one measurement from start to end
rows       the rows: ours through gRPC, transformers in its process
peer       that process
sessions   sessions of ours, begun together or one after the other
arrivals   requests that come when they come, and how many are served in time
figures    speeds, pauses between tokens, and what a step takes beside the forward
judged     what is needed, and whether it holds
report     the table, and bench/results/batch.json
plot       bench/results/batch.png
"""
