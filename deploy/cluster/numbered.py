"""Actors of which a deployment has one of a kind. A newer one has a higher number, and counts while both are there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import ray


class Numbered:
    """The actors KIND:NUMBER of the namespace: named, detached, restarted by Ray, nothing to the scheduler."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def numbers(self) -> list[int]:
        form = re.compile(rf"{self._kind}:(\d+)")
        return [int(found[1]) for text in ray.util.list_named_actors() if (found := form.fullmatch(text))]

    def newest(self) -> Any | None:
        numbers = self.numbers()
        return self._actor(max(numbers)) if numbers else None

    def begin(self, what: type, *arguments: object, runtime_env: Mapping[str, Any] | None = None) -> Any:
        """A newer one, made by `what` with these arguments."""
        options: dict[str, Any] = {
            "name": f"{self._kind}:{max(self.numbers(), default=0) + 1}",
            "lifetime": "detached",
            "max_restarts": -1,
            "num_cpus": 0,
        }
        if runtime_env:
            options["runtime_env"] = dict(runtime_env)
        return ray.remote(what).options(**options).remote(*arguments)

    def end(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            with suppress(ValueError):  # gone meanwhile
                ray.kill(self._actor(number))

    def _actor(self, number: int) -> Any:
        return ray.get_actor(f"{self._kind}:{number}")
