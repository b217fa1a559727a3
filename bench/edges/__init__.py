"""One pool of verifiers for many edges: what each gets, what each costs, and what a loss costs all."""
