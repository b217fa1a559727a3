"""The composition root: the `specwire` command, one machine's stack, Ray clusters."""
