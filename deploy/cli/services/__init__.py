"""Commands that serve until a signal comes: a whole stack, an edge, the registry for those without a way to Redis."""
