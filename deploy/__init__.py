"""The composition root: the local stack, its Ray actors, and the `specwire` command."""
