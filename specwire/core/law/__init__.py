"""The law: which token is decided, by rule, sampling, noise and constraint.

It knows no policy and no session. Its vectorised twins are `noise`, `logits` and `sampler` of `specwire.lm`; tests hold
them equal.
"""
