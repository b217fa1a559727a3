"""All measurements. `make bench-NAME` runs the file or the room of that name, a room by its module `run`;
bench-ROOM-MODULE runs another module of a room. With -ordinary it is the same without AVX-512.

main          make bench, bench-box, both with -ordinary: one session beside transformers and OpenVINO GenAI
batch         many sessions at once; bench-batch-ordinary, too
heads         heads beside the target; bench-heads-ordinary, too
suffix        proposals from the text itself, and from other texts
step, gpu     the target's step by itself
vllm          the included pair in vLLM
wan, sweep, branching               drafters that are far away: real sockets and virtual time
cluster                             many verifiers and orchestrators
soak, soak_load                     make soak; make soak-load
laws          make statistics; make statistics-vllm by laws.vllm

harness       what all of them share
peers         the other engines
relay         a line with delay and faults
results       what was recorded

bench-failover is in tests/faults: it measures the cells of the failover matrix.
"""
