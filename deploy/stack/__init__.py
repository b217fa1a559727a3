"""The whole stack on one machine: Redis, services as processes or threads, an orchestrator."""
