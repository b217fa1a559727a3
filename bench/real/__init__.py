"""`make bench-real`: models that people run, their texts, and the libraries that people run them with.

run      the command: python -m bench.real.run; settings, pieces, turns, and the journal by which a run goes on
prompts  a fixed sample of Spec-Bench and HumanEval, or forty prompts of the project's own
rows     who takes part: `specwire up` with each source, with a drafter at a distance; llama.cpp, OpenVINO GenAI
report   ratios with their intervals, bars, tables
plot     the picture
"""
