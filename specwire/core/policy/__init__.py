"""How much is drafted and tested, and when. It may change how fast a text comes, never the text.

So it is under `greedy` and `coupled`. Under `rejection` and `block` the text may differ, its law may not
(docs/EXACTNESS.md).
"""
