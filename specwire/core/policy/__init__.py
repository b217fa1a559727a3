"""How much is drafted and tested, and when. It may change how fast a text comes, never the text.

So it is under `greedy` and `coupled` with equal logits. Under `rejection` and `block` the text may differ, its law may
not; under `threshold` and `typical`, which a client must name, both may (docs/EXACTNESS.md).
"""
