"""The orchestrator: client-facing; relays, logs and emits, and decides no token."""
