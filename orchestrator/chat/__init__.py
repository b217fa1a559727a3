"""Chats, over gRPC or HTTP: from messages and tools to a prompt, and from a text to calls."""
