"""Models that learn: the only room that changes weights, which nothing that serves imports.

`head` and `drafter` teach a target's own answers (`own_answers`) to a head for it, and to a drafter, by the steps of
`loop`.
"""
