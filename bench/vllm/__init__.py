"""vLLM's own speculation beside specwire's drafters for it, and a verifier of ours on vLLM's worker: `make bench-vllm`.

run      the measurement: python -m bench.vllm.run
server   vLLM as a server and as a library, from the environment that `make setup-vllm` makes
offline  the process in which it is a library
"""
