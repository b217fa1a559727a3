"""The numbers that a verifier's policy is tuned by stand in one table, each with a reason, and each is used."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from specwire.core.policy import tunables

ROOT = Path(tunables.__file__).parents[3]
TABLE = Path(tunables.__file__)
DRAFTING = [
    *TABLE.parent.glob("*.py"),
    *(TABLE.parents[1] / "verify").glob("*.py"),
    ROOT / "verify_service" / "engine" / "heads.py",
]
# What is no choice of speed: bounds on memory, messages and files, and on a verifier that is not served so.
REMEMBERED = {"REMEMBERED_VERDICTS", "REMEMBERED_CHAINS", "REMEMBERED_FORWARDS"}
KEPT = {
    "FIRST_TOKENS",
    "TOKEN_BYTES",
    "TOKENS_A_TEXT",
    "BEGINNING_TOKENS",
    "MOST_LINEAGE",
}
SLOTS = {"TEXT", "END", "TAGS", "LINKS", "WORD_MASK", "TAG_BITS"}
HASHING = {"HASH_BASE", "HASH_SPREAD", "HASH_SHIFT", "POWERS", "TAG_SHIFT", "TAG_MASK"}
# Multiples of what the table has.
DERIVED = {
    "MOST_NGRAM",
    "VOTED_PRIORS",
    "CHAIN_LINKS",
    "GATHERED_TOKENS",
    "BESIDE_A_STEP",
    "LEAST_PATH_SHARE",
}
BOUNDS = {*DERIVED, *REMEMBERED, *KEPT, *SLOTS, *HASHING}


def numbers(path: Path) -> set[str]:
    """Names that a module gives to numbers, and to tuples of them."""
    named = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(each, ast.Constant) for each in ast.walk(node.value)):
            named |= {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return {name for name in named if name.isupper()}


def test_no_other_module_has_a_number_of_its_own() -> None:
    elsewhere = {name for path in DRAFTING if path != TABLE for name in numbers(path)}
    assert elsewhere - BOUNDS == {"NO_PATH"}


def test_no_other_number_has_one_of_their_names() -> None:
    rooms = ("specwire", "draft_service", "verify_service", "orchestrator", "deploy")
    paths = [path for room in rooms for path in (ROOT / room).rglob("*.py") if path != TABLE]
    assert {name: path for path in paths for name in numbers(path) & numbers(TABLE)} == {}


def test_each_has_a_reason_and_is_used() -> None:
    services = TABLE.parents[3]
    others = (
        "deploy/stack/hosts.py",
        "verify_service/engine/engine.py",
        "verify_service/server.py",
    )
    users = [*DRAFTING, *(services / each for each in others)]
    lines, used = TABLE.read_text().splitlines(), "\n".join(path.read_text() for path in users if path != TABLE)
    for name in numbers(TABLE):
        at = next(index for index, line in enumerate(lines) if re.match(rf"(\w+, )?{name}\b", line))
        while not lines[at - 1].startswith("#"):
            at -= 1
            assert lines[at], f"{name} has no reason"
        assert re.search(rf"\b{name}\b", used), f"{name} is not used"
