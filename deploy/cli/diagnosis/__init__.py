"""Commands that say how things stand, or would: checks, figures, simulations, measurements."""
