"""`make conformance-schemas`: documents that the grammar of a JSON schema allows, drawn at random, against the schema.

Of the JSON Schema Test Suite, which jsonschema's source distribution has, and of schemas at random, whose keywords
overlap. No accepted schema may have a document that does not fit it, or a text that cannot go on, and none of the suite
that the library alone compiles may be refused.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher
from tokenizers import Tokenizer

from demo_pair import TARGET
from specwire.core.invalid import InvalidParameter
from specwire.core.law.constraint import Constraint, ConstraintKind
from specwire.text.constraint_process import Grammars, Matching
from tests.conformance import keep

ROOT = Path(__file__).parents[2]
VOCABULARY, END = 4096, 0
# Tokens of a document; one that has not ended by then is left.
MOST_TOKENS = 120
# Likelier than others, so that most documents come to their end.
CLOSERS = frozenset('"}],:0123456789abx-.')
# A key that is not declared may be written so, past the schema of what it means (docs/HTTP.md).
ESCAPED_KEY = re.compile(r'\\u[^"]*"\s*:')


@dataclass
class Table:
    accepted: int = 0
    documents: int = 0
    unfinished: int = 0
    unchecked: int = 0
    escaped: int = 0
    refused: int = 0
    alone: int = 0  # refused, though the library compiles them
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"accepted {self.accepted}, with {self.documents} documents ({self.unfinished} unfinished, "
            f"{self.unchecked} whose patterns Python cannot read, {self.escaped} wrong by a key with escapes); "
            f"refused {self.refused}, of which the library alone compiles {self.alone}; "
            f"invalid or stuck: {len(self.wrong)}"
        )


@cache
def grammars() -> Grammars:
    return Grammars((TARGET / "tokenizer.json").read_bytes(), VOCABULARY, (END,))


@cache
def pieces() -> tuple[list[str], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Each id's text; which close something, which are more than white space."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [tokenizer.decode([token]) for token in range(VOCABULARY)]
    return texts, np.array([text in CLOSERS for text in texts]), np.array([bool(text.strip()) for text in texts])


def drawn(matching: Matching, source: random.Random) -> list[int] | None:
    """A document's tokens; None where it has not ended. Raises AssertionError where it is stuck."""
    tokens: list[int] = []
    _, closing, telling = pieces()
    while len(tokens) < MOST_TOKENS:
        (mask,) = matching.masks(())
        assert mask is not None
        assert mask.any(), f"stuck behind {tokens}: {matching.trouble}"
        if mask[END] and (source.random() < 0.4 or mask.sum() == 1):
            return tokens
        mask[END] = False
        way = source.random()
        likely = mask & closing if way < 0.5 else mask & telling if way < 0.97 else mask
        token = int(source.choice(np.flatnonzero(likely if likely.any() else mask)))
        assert matching.take([token]) == 1
        tokens.append(token)
    return None


def as_python(schema: Any) -> Any:
    r"""With its expressions as Python reads ECMA's: \w and the like are of ASCII, but \s."""
    if isinstance(schema, list):
        return [as_python(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: as_python(each) for key, each in schema.items()}
    if isinstance(found.get("pattern"), str):
        found["pattern"] = "(?a:{})".format(found["pattern"].replace(r"\s", r"(?u:\s)").replace(r"\S", r"(?u:\S)"))
    if isinstance(found.get("patternProperties"), dict):
        found["patternProperties"] = {f"(?a:{key})": each for key, each in found["patternProperties"].items()}
    return found


def is_multiple(_: object, step: float, value: object, __: object) -> Iterator[jsonschema.ValidationError]:
    """As both are written: a remainder of floating-point numbers is none."""
    if isinstance(value, int | Fraction) and not isinstance(value, bool) and value % Fraction(str(step)):
        yield jsonschema.ValidationError(f"{value} is no multiple of {step}")


Validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"multipleOf": is_multiple})


def exact(text: str) -> int | float | Fraction:
    """A number of a document, as it is written; one with an exponent may have any number of digits."""
    if "e" in text.lower():
        return float(text)
    value = Fraction(text)
    return int(value) if value.denominator == 1 else value


def try_schema(schema: dict[str, Any], table: Table, documents: int, seed: int) -> None:
    """Count what becomes of it."""
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(schema),))
    try:
        matching = grammars().begin(constraint)
    except InvalidParameter:
        table.refused += 1
        table.alone += not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
        return
    table.accepted += 1
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    validator = Validator(as_python(schema), format_checker=Validator.FORMAT_CHECKER)
    for number in range(documents):
        matching.rollback(0)
        text = ""
        try:
            tokens = drawn(matching, random.Random(f"{seed} {number}"))
            if tokens is None:
                table.unfinished += 1
                continue
            table.documents += 1
            text = tokenizer.decode(tokens)
            fits = validator.is_valid(json.loads(text, parse_float=exact))
        except re.error:
            table.unchecked += 1
        except (AssertionError, ValueError) as error:
            table.wrong.append(f"{json.dumps(schema)}: {text} {error}")
        else:
            if not fits and ESCAPED_KEY.search(text):
                table.escaped += 1
            elif not fits:
                table.wrong.append(f"{json.dumps(schema)}: {text}")


def suite() -> Iterator[dict[str, Any]]:
    """The test suite's schemas of draft 2020-12, fetched into build/ once. True and false are left out."""
    folder = ROOT / "build" / "json-schema-suite"
    name = f"jsonschema-{version('jsonschema')}"
    if not (folder / name).is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        what = ["--no-deps", "--no-binary", ":all:", f"jsonschema=={version('jsonschema')}"]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "-d", str(folder), *what], check=True)
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    for file in sorted((folder / name / "json" / "tests" / "draft2020-12").glob("**/*.json")):
        yield from (case["schema"] for case in json.loads(file.read_text()) if isinstance(case["schema"], dict))


# ----------------------------------------------------------------------------------------------------------------------
# Schemas at random: of a kind that people write, but with keywords that overlap and contradict.

BOUNDS = (0, 1, -1, 0.5, -0.5, 1.5, 3, 10, 0.1, -2.25, 100, 1e-3, 7)
PATTERNS = ("^a", "b$", "^[ab]{1,3}$", "a|b", "^x?", "[0-9]", "^.{2}$", "", r"\.", "^a.*b$")
KEYS, KEY_PATTERNS = ("a", "ab", "b", "x1", "id", 'x"y', "é"), ("^a", "b", "^x[0-9]$", ".", "^c$", "a$", "^(ab|a)$", "")
VALUES = ("a", "ab", 1, 1.5, None, True, [1], {"a": 1}, "", 0)
ODD: tuple[dict[str, Any], ...] = (
    {"minLength": 2},
    {"minimum": 1},
    {"pattern": "b"},
    {"required": ["a"]},
    {"minItems": 2},
)
FORMATS = ("date", "time", "ipv4", "uuid", "email", "hostname")


def random_schema(source: random.Random, depth: int = 0) -> dict[str, Any]:
    kind = source.random() * (0.5 if depth > 1 else 1.0)
    for limit, make in ((0.18, _number), (0.36, _string), (0.5, _choice), (0.78, _object), (0.88, _array)):
        if kind < limit:
            return make(source, depth)
    name = source.choice(("allOf", "anyOf", "oneOf"))
    several = {name: [random_schema(source, depth + 1) for _ in range(2)]}
    return several | (random_schema(source, depth + 1) if source.random() < 0.5 else {})


def _some(source: random.Random, likely: float, **values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if source.random() < likely}


def _number(source: random.Random, _: int) -> dict[str, Any]:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    bounds = _some(source, 0.35, **{name: source.choice(BOUNDS) for name in names})
    step = _some(source, 0.25, multipleOf=source.choice((1, 2, 3, 0.5, 0.1, 0.25, 1.5, 10)))
    return {"type": source.choice(("integer", "number")), **bounds, **step}


def _string(source: random.Random, _: int) -> dict[str, Any]:
    lengths = _some(source, 0.3, minLength=source.randint(0, 3), maxLength=source.randint(0, 4))
    of_text = _some(source, 0.35, pattern=source.choice(PATTERNS), format=source.choice(FORMATS))
    return {"type": "string", **lengths, **of_text}


def _choice(source: random.Random, _: int) -> dict[str, Any]:
    of: tuple[dict[str, Any], ...] = (
        {"enum": source.sample(VALUES, source.randint(1, 4))},
        {"const": source.choice(VALUES)},
        {},
        {"type": "null"},
    )
    either = {"type": ["integer", "string"], "minimum": 2, "minLength": 2}
    return {**source.choice((*of, either)), **(source.choice(ODD) if source.random() < 0.15 else {})}


def _object(source: random.Random, depth: int) -> dict[str, Any]:
    def value() -> Any:
        return random_schema(source, depth + 1) if source.random() < 0.9 else source.choice((True, False))

    declared = {name: value() for name in source.sample(KEYS, source.randint(0, 3))}
    by_pattern = {pattern: value() for pattern in source.sample(KEY_PATTERNS, source.choice((1, 1, 2)))}
    more = _some(source, 0.6, patternProperties=by_pattern, additionalProperties=source.choice((False, False, value())))
    counts = _some(source, 0.15, minProperties=source.randint(0, 3), maxProperties=source.randint(0, 3))
    required = _some(source, 0.5, required=source.sample((*KEYS, "zz"), source.randint(1, 2)))
    return {"type": "object", "properties": declared, **more, **counts, **required}


def _array(source: random.Random, depth: int) -> dict[str, Any]:
    first = [random_schema(source, depth + 1) for _ in range(source.randint(1, 2))]
    rest = source.choice((random_schema(source, depth + 1), False))
    counts = _some(source, 0.4, minItems=source.randint(0, 3), maxItems=source.randint(0, 3))
    return {"type": "array", **_some(source, 0.55, prefixItems=first, items=rest), **counts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=8, help="of each schema")
    parser.add_argument("--random", type=int, default=500, help="schemas")
    args = parser.parse_args()
    wrong: list[str] = []
    of_random = [random_schema(random.Random(seed)) for seed in range(args.random)]
    for name, schemas in (("suite", list(suite())), ("random", of_random)):
        table = Table()
        for seed, schema in enumerate(schemas):
            try_schema(schema, table, args.documents, seed)
        print(f"{name}: {table}")
        wrong += table.wrong
        if name == "suite":
            wrong += ["a schema is refused that the library alone compiles"] * table.alone
            keep(
                {
                    "suite": "JSON Schema Test Suite (2020-12), schemas",
                    "passed": table.accepted,
                    "by_design": table.refused - table.alone,
                    "failed": len(wrong),
                    "told": f"{table.documents:,} documents",
                }
            )
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
