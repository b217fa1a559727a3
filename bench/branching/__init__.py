"""What windows of several paths would gain, in virtual time (docs/LOG.md).

tree_windows  if a verifier tested several paths of drafters' trees in one forward
head_windows  if these were of a head's runners-up
"""
