"""Whether texts follow the target's law, through a whole stack and on engines beside it."""
