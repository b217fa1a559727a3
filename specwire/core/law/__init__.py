"""The law: which token is decided, by rule, sampling, noise and constraint.

It knows no policy and no session. The numpy functions here are the reference; what a model server runs over whole
batches are their torch twins in `specwire.lm.law`, and tests hold the two equal. Where a
text ends is said in `specwire.core.text` (ids, length) and `specwire.text` (stop strings).
"""
