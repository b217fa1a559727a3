"""The law: which token is decided, by rule, sampling, noise and constraint.

It knows no policy and no session. `specwire.lm.sampler` is its vectorised twin, held equal by tests.
"""
