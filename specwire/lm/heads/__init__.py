"""Heads: small models beside a target that read its hidden states and guess what it says next.

`eagle3` is a model and its two file formats; `training` teaches one. A head never decides: like every source it
proposes, and the target draws its own tokens.
"""
