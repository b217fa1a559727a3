"""OpenAI's API and the console, on the orchestrator's own loop."""
