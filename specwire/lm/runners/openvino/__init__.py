"""OpenVINO computes the forward: `runner` builds a model's graph, `graph` runs graphs over pages of a cache."""
