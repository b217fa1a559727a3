"""Callers' requests, over gRPC or HTTP: checked, begun, read and ended here; and the gRPC services."""
