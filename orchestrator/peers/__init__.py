"""Verifiers and drafters: links to them, what they serve, and which session gets which."""
