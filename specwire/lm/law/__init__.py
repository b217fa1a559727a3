"""The target's choice on tensors: which token stands at a row of logits.

Under greedy and coupled nothing else in lm may change a text. Under rules that weigh a draft token by the probability
that it was drawn with, `guesses.draw_weighed` draws it and tells that: a mistake there would bias the law.

`sampler` is the twin of `specwire.core.law.acceptance`, `logits` of its `sampling`, `noise` of its `noise`; tests hold
each two equal. Who guesses does not import `sampler`.
"""
