"""All measurements. `make bench-NAME` runs the room of that name by its module `run`, or the file; with -ordinary it is
the same without AVX-512.

speed         make bench-real: models that people run, beside llama.cpp and OpenVINO GenAI; of the included pair
              make bench, bench-box, bench-batch, bench-heads
vllm          drafters and verifiers in vLLM
gpu           a large target's steps by themselves
wan, sweep    drafters that are far away: real sockets, and virtual time
reference     make bench-reference: texts of a GGUF file beside those of the libraries that define it
cluster       many verifiers and orchestrators
soak          make soak; make soak-load
laws          make statistics; make statistics-vllm by laws.vllm

harness       what all of them share
peers         the other engines
relay         a line with delay and faults
results       what was recorded

bench-failover is in tests/faults: it measures the cells of the failover matrix.
"""
