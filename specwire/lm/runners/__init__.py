"""What computes a forward: our decoder, the same compiled, a model's own modules, OpenVINO; and the choice.

A runner computes the given rows at the given positions of slots: it knows no lengths, sessions or sampling.
Only `select` knows all of them; OpenVINO and the runners on torch share weights and linear layers, nothing else.
"""
