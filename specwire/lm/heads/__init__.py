"""Heads: small models beside a target that read its hidden states and guess what it says next.

A head never decides: like every source it proposes, and the target draws its own tokens.

Kinds: `eagle3`, `medusa` (with Hydra), `mtp` (a layer of the target's checkpoint), each with its files and as torch
computes it; `layer` is what those of a decoder layer share, `openvino_heads` computes all of them by OpenVINO. `files`
reads configurations and tensors, `select` finds the kind, `slots` is a target with one beside it. `self_speculation`
needs no head: the target drafts without some of its layers. How heads are taught is in `specwire.lm.training`.
"""
