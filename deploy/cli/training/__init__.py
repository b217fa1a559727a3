"""Commands that make what proposes: a drafter, and heads."""
