"""A verifier: one engine around the target model, which alone decides tokens, and its gRPC service."""
