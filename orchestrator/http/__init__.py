"""What HTTP callers meet, on the orchestrator's own loop: OpenAI's API in `openai`, the console and its `page`.

`server` listens with connections of its own (`connection`), `app` has the routes, `endpoint` what each of them shares
and how bodies are read, `errors` what is refused.
"""
