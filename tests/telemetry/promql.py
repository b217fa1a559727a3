"""As much of PromQL as tells a typing error: names with what is selected of them, functions, brackets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

PREFIX = "specwire:"
FUNCTIONS = {"rate", "increase", "histogram_quantile", "sum", "min", "max", "avg", "scalar", "humanizeDuration"}
RATES = re.compile(r"\b(rate|increase)\(")
SELECTOR = re.compile(r"(specwire:[a-z0-9_]+|\bup)(\{[^}]*\})?(\[[^\]]*\])?")
MATCHER = re.compile(r'([a-z_]+)(=~|!~|!=|=)"((?:[^"\\]|\\.)*)"')
DURATION = re.compile(r"\[(\d+[smh]|\$__rate_interval)\]")
GROUPING = re.compile(r"\bby \(([a-z_, ]*)\)")
# What Prometheus itself adds to every sample.
ADDED = {"job", "instance"}


@dataclass(frozen=True, slots=True)
class Selected:
    """name: of the metric, without the prefix. matched: labels and the values that they must have."""

    name: str
    matched: dict[str, str]
    ranged: bool


def selected(expression: str) -> Iterator[Selected]:
    """The metrics of ours that an expression reads; ValueError where it is none."""
    _check(expression)
    for name, matchers, span in SELECTOR.findall(expression):
        inner = matchers[1:-1]
        if MATCHER.sub("", inner).strip(" ,"):
            raise ValueError(f"{matchers}: no matchers")
        if span and not DURATION.fullmatch(span):
            raise ValueError(f"{span}: no duration")
        if name.startswith(PREFIX):
            found = {label: value for label, _, value in MATCHER.findall(inner)}
            yield Selected(name.removeprefix(PREFIX), found, bool(span))


def grouped(expression: str) -> set[str]:
    """The labels that an expression groups by."""
    return {label for group in GROUPING.findall(expression) for label in re.split(r", *", group) if label}


def _check(expression: str) -> None:
    stack: list[str] = []
    pairs = {")": "(", "]": "[", "}": "{"}
    for character in re.sub(r'"(?:[^"\\]|\\.)*"', "", expression):
        if character in "([{":
            stack.append(character)
        elif character in ")]}" and (not stack or stack.pop() != pairs[character]):
            raise ValueError(f"{expression}: {character} closes nothing")
    if stack:
        raise ValueError(f"{expression}: {stack} stay open")
    unknown = set(re.findall(r"\b([a-zA-Z_]+)\(", expression)) - FUNCTIONS
    if unknown:
        raise ValueError(f"{expression}: no functions {unknown}")
    if len(RATES.findall(expression)) != len(DURATION.findall(expression)):
        raise ValueError(f"{expression}: every rate has one range, and nothing else has")
