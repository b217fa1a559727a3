"""What is raised where a request's parameter is wrong."""

from __future__ import annotations


class InvalidParameter(ValueError):
    """A request's parameter is invalid. `field` is its name on the wire."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ContextExceeded(InvalidParameter):
    """Prompt and output do not fit the context: said in the words that clients of OpenAI's API look for."""

    def __init__(self, field: str, message: str, context: int) -> None:
        super().__init__(field, f"{message}: this model's maximum context length is {context} tokens")
