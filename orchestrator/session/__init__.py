"""One session: its driver, its verifier, its drafters, its output, its part of the log."""
