"""specwire: speculative decoding over the wire."""

__version__ = "0.1.0"
