"""vLLM's own speculation beside specwire's drafters for it.

server    a plain vLLM server as a process, from the environment that `make setup-vllm` makes
run       the measurement: python -m bench.vllm.run
"""
