"""Drafters: cheap models that keep a chain of guesses ahead of the decided text of many sessions."""
