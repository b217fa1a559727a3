"""A large target on a GPU, with random weights: a step against the memory's bandwidth, and tokens per second.

run        the command: python -m bench.gpu.run; tables, bars, bench/results/gpu.json
shapes     models of the shapes of well-known ones, and EAGLE-3 heads, arranged so that what they say next is known
steps      time per step, what it must read, and how fast this memory is
decoding   the verify engine in this process, without network and Ray, drafted for by an oracle, a drafter, a head;
           transformers, plain and assisted, with the same weights
"""
