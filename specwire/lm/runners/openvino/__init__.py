"""OpenVINO computes the forward: `runner` has the models, `graph` how a model becomes a graph over pages of a cache."""
