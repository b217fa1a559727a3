"""Heads: small models beside a target that read its hidden states and guess what it says next.

`eagle3` and `medusa` (with Hydra) are models and their file formats; `training` teaches one. A head never decides: like
every source it proposes, and the target draws its own tokens. `self_speculation` needs no head: the target drafts
without some of its layers, which `layer_search` chooses.
"""
