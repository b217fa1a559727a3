"""How fast whole stacks are, beside libraries that people run: `make bench-real`; of the included pair `make bench`,
bench-box, bench-batch, bench-heads.

run      the command: python -m bench.speed.run; settings, pieces, turns, and the journal by which a run goes on
prompts  a fixed sample of Spec-Bench and HumanEval, or forty prompts of the project's own; those of the pair
rows     who takes part: `specwire up` with each source, with a drafter at a distance; the libraries
report   ratios with their intervals, what is needed, tables
"""
