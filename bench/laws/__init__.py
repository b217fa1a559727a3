"""Whether texts follow the target's law, through a whole stack and on engines beside it.

run       make statistics: by rule and drafter, with biased ones that must be refused (biased)
vllm      make statistics-vllm
peer      the same of other engines
sampling  many short texts of a stack; exact: their law, and how far they are from it; pair: models of four ids
"""
