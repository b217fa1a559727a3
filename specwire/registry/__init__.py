"""The registry: services announce themselves in Redis, and orchestrators read it."""
