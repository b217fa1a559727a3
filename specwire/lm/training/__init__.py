"""Models that learn: the only room that changes weights, which nothing that serves imports.

`course` teaches a head its target's own answers, by the steps of `loop`; `record` is what is kept beside it.
`online` goes on teaching a drafter or a head what its target decides.
"""
