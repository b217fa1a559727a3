"""A mapping of a YAML file, taken apart by name and type."""

from __future__ import annotations

from typing import Any

MOST_AMOUNT = 1 << 20


class InvalidConfig(ValueError):
    """One sentence that names the key, as pools.large.kind, and its value."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")


class YamlKeys:
    """A mapping, taken apart by name and type. Raises InvalidConfig. `place`: of the mapping, "" of the whole file."""

    def __init__(self, place: str, value: object) -> None:
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise InvalidConfig(place or "file", f"must be a mapping, not {value!r}")
        self._place = place
        self._left = dict(value)

    def of(self, name: str) -> str:
        """A key's name for people."""
        return f"{self._place}.{name}" if self._place else name

    def end(self) -> None:
        """Whatever was not taken is not known."""
        for name in self._left:
            raise InvalidConfig(self.of(name), "is not known")

    def text(self, name: str, default: str | None = None) -> str:
        value = self._left.pop(name, default)
        if value is None:
            raise InvalidConfig(self.of(name), "is missing")
        if not isinstance(value, str) or not value.isprintable() or (value == "" and default is None):
            raise InvalidConfig(self.of(name), f"must be a text, not {value!r}")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in choices:
            raise InvalidConfig(self.of(name), f"must be one of {', '.join(choices)}, not {value!r}")
        return value

    def count(self, name: str, default: int, least: int, most: int) -> int:
        value = self._left.pop(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InvalidConfig(self.of(name), f"must be a whole number from {least} to {most}, not {value!r}")
        return value

    def optional_count(self, name: str, least: int, most: int) -> int | None:
        return self.count(name, least, least, most) if self._left.get(name) is not None else None

    def amount(self, name: str, default: float, most: float = MOST_AMOUNT) -> float:
        """`default` is what it is where nothing is said."""
        if name not in self._left:
            return default
        value = self._left.pop(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= most:
            raise InvalidConfig(self.of(name), f"must be a number from 0 to {most:.10g}, not {value!r}")
        return float(value)

    def mapping(self, name: str) -> dict[Any, Any]:
        value = self._left.pop(name, None)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise InvalidConfig(self.of(name), f"must be a mapping, not {value!r}")
        return value
