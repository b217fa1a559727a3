"""Speculation over a long line: drafter and orchestrator here, the verifier behind a relay of ours.

relay, way, frames   a process: delays each direction, holds back, cuts, counts what HTTP/2 carries
link, gauge          the relay as its owner sees it; what it costs itself
"""
