"""specwire's drafters for a plain vLLM server: what runs inside vLLM's worker (docs/VLLM.md)."""

from specwire.vllm.proposer import Proposer

__all__ = ["Proposer"]
