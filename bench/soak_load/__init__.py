"""`make soak-load`: a thousand sessions at once. Speed, memory, and whether memory grows."""
