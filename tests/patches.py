"""The forms that mistakes take: an answer that never varies, or one that is a little wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Patch = pytest.MonkeyPatch


def always_returning(patch: Patch, owner: object, name: str, value: object) -> None:
    """A check that is left out returns None."""
    patch.setattr(owner, name, lambda *_: value)


def always_awaited(patch: Patch, owner: object, name: str, value: object) -> None:
    async def same(*_: Any) -> object:
        return value

    patch.setattr(owner, name, same)


def with_result(patch: Patch, owner: object, name: str, change: Callable[[Any], object]) -> None:
    original: Callable[..., Any] = getattr(owner, name)
    patch.setattr(owner, name, lambda *args: change(original(*args)))


def with_awaited(patch: Patch, owner: object, name: str, change: Callable[[Any], object]) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    async def changed(*args: Any) -> object:
        return change(await original(*args))

    patch.setattr(owner, name, changed)
