"""The target's choice on tensors: which token stands at a row of logits.

With equal logits, nothing else in lm may change a text under greedy and coupled. Other rules weigh a draft token by the
probability that it was drawn with. `guesses.draw_weighed` draws it and tells that probability: a mistake there would
bias the law.

`sampler` is the twin of `specwire.core.law.acceptance` and its `noise`, `logits` of its `sampling`; tests hold
each two equal. Who guesses does not import `sampler`.
"""
