"""Commands that make what proposes: a drafter, heads, a choice of layers, a table of n-grams."""
