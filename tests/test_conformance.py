"""What `make conformance` makes of the suites' results."""

from __future__ import annotations

from typing import Any

from tests.conformance import TRIES, Outcome, faults, outcomes

CUT = "expected status='completed', got 'incomplete'"


def result(name: str, *errors: str) -> dict[str, Any]:
    return {"id": name, "status": "failed" if errors else "passed", **({"errors": list(errors)} if errors else {})}


def test_only_a_text_that_was_cut_is_asked_for_again() -> None:
    asked: list[str | None] = []
    tries = {"cut": [result("cut", CUT), result("cut")], "always": [result("always", CUT)] * TRIES}

    def ask(name: str | None) -> list[dict[str, Any]]:
        asked.append(name)
        if name is None:
            return [result("cut", CUT), result("wrong", CUT, "HTTP 400"), result("fine"), result("always", CUT)]
        return [tries[name].pop(0)]

    found = list(outcomes(ask))
    assert [(each.name, each.status, each.tries) for each in found] == [
        ("cut", "passed", 3),
        ("wrong", "failed", 1),
        ("fine", "passed", 1),
        ("always", "failed", TRIES),
    ]
    assert asked == [None, "cut", "cut", *["always"] * (TRIES - 1)]


def test_what_differs_from_the_table_is_told() -> None:
    found = [
        Outcome("images", "failed", ["HTTP 400"]),
        Outcome("text_a", "passed", []),
        Outcome("a_text", "passed", []),
    ]
    assert faults(found, {"image.*": "none"}) == []
    assert faults([Outcome("images", "failed", ["HTTP 500"])], {"images": "none"}) == [
        "images: failed: HTTP 500, where a refusal was expected (none)"
    ]
    assert faults(found[:2], {"images|text_a": "its words"}, refused=False) == []
    assert faults([Outcome("words", "failed", ["assert 500 == 200"])], {"words": "its words"}, refused=False) == [
        "words: failed: assert 500 == 200, which is not expected"
    ]
    assert faults(found, {}) == ["images: failed: HTTP 400, which is not expected"]
    told = faults(found, {"images": "none", "text_.": "no letters", "gone": "of an older suite"})
    assert told == [
        "text_a: passed, where a refusal was expected (no letters)",
        "gone: matches no test (of an older suite)",
    ]
