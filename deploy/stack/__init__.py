"""The whole stack on one machine: Redis, services under Ray or as plain processes, an orchestrator."""
