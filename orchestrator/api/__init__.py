"""What callers ask over gRPC: requests are checked here, and answered."""
