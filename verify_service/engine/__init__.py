"""The engine: one thread that owns the target model, its sessions, their slots, and the steps."""
