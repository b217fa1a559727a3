"""Randomness for the rules that look at proposals: every random number is used for one decision.

The noise of `greedy` and `coupled` depends on the position only, so that a text can be replayed. Under `rejection` and
`block` that would be wrong twice over:

- `block` judges a token by those behind it. Where it refuses, that says something about tokens at later positions, and
  so about the noise that they were drawn with. Drawn again at the same positions with the same noise, they are biased.
- What a verifier decided and the log did not get is decided again by its successor. The lost decision has shown in what
  the drafter did meanwhile, so whether a token is tested now may depend on it: it must not be drawn, nor tested, with
  the same numbers.

So the seed of a draw at a place depends on the text before it, every token of it, and on the *epoch*: another one for
each time that a verifier opens the session. A drafter that draws behind the same text in the same epoch has the noise
of the target's own draw there, and draws the same token again.
"""

from __future__ import annotations

from specwire.core.text import EMPTY_HASH, extend_hash


def epoch_of(fence: int, attach: int) -> int:
    """The epoch of one connection generation, 64 bits and never 0."""
    return extend_hash(extend_hash(EMPTY_HASH, fence), attach) or 1


def seed_behind(seed: int, epoch: int, prefix_hash: int) -> int:
    """The 64-bit noise key for what stands behind the text of `prefix_hash`.

    Three words mixed as tokens are into a text's hash (PROTOCOL.md, section 4).
    """
    return extend_hash(extend_hash(extend_hash(EMPTY_HASH, seed), epoch), prefix_hash)
