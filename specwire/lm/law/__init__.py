"""The target's choice on tensors: which token stands at a row of logits. The only room of lm that may change a text.

`sampler` is the twin of `specwire.core.law.acceptance`, `logits` of its `sampling`, `noise` of its `noise`; tests hold
each two equal. Who guesses does not import `sampler`.
"""
