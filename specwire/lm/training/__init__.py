"""Models that learn: the only room that changes weights, which nothing that serves imports.

`course` teaches a head beside a target from a user's texts, by the loop and losses of `distillation`; `record` is what
is kept beside it. `online` goes on teaching a drafter what its target decides.
"""
