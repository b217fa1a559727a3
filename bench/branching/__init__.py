"""What trees of draft tokens gain over chains, in virtual time (docs/BRANCHING.md).

run           by cell, and by where the drafter is: python -m bench.branching.run
tree_windows  if a verifier tested several paths in one forward
head_windows  if these were of a head's runners-up
head_depths   what a head's depth gains by how sure it is
draft_rows    what a further token of a drafter's forward costs, measured
"""
