"""A large target on a GPU, with random weights: a step against the memory's bandwidth, and tokens per second.

run        the command: python -m bench.gpu.run
shapes     models of the shapes of well-known ones, arranged so that what they say next is known
head       an EAGLE-3 head beside such a target, arranged likewise
floor      what a step must read, and how fast this memory is
steps      time per step
decoding   the verify engine in this process, without network and Ray: drafting off, by an oracle, a drafter, a head
peer       transformers, plain and assisted, with the same weights
results    the tables, the bars, and bench/results/gpu.json
"""
