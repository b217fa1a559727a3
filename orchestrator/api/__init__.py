"""What callers ask, over gRPC or HTTP: checked here, begun, read and ended; and the gRPC services."""
