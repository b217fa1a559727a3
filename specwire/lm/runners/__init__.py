"""What computes a forward: our decoder, the same compiled, a model's own modules, OpenVINO; and which of them serves.

A runner computes the rows that it is told, at positions of slots that it is told: no lengths, no sessions, no sampling.
`select` alone knows all of them; OpenVINO and the ones on torch share weights and linear layers, nothing else.
"""
