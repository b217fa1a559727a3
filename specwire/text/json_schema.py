"""What of a JSON schema the grammar library would not serve right: told in another way, or refused by its keyword.

Seen with llguidance 1.9.1; the library itself refuses all else that it does not serve. `make conformance-schemas` looks
for more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

Json = Any

# Keywords whose value is a schema, a list of schemas, or schemas by name.
OF_ONE = ("items", "additionalProperties", "additionalItems")
OF_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
DEFINITIONS = ("$defs", "definitions")
# Between a bound that a number must not reach and the least or greatest one that is allowed. The library takes a whole
# exclusive bound as allowed where the other bound lies less than 1 from it; this far from it, it does not.
NEXT = 1e-9
# Beyond it a bound and its neighbour are the same floating-point number.
MOST_EXACT = 1 << 20
# What texts of a format begin with, too: the library has a 29 February in each year, a year 0000, and a second 60.
YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
OF_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
LEAP_YEAR = f"(?:[0-9]{{2}}{OF_FOUR}|{OF_FOUR}00)"
DATE = f"(?:{YEAR}-(?:(?:0[13-9]|1[0-2])-[0-9]{{2}}|02-(?:[01][0-9]|2[0-8]))|{LEAP_YEAR}-02-29)"
TIME = "[0-9]{2}:[0-9]{2}:[0-5]"
OF_FORMAT = {"date": f"^{DATE}", "time": f"^{TIME}", "date-time": f"^{DATE}[Tt]{TIME}"}
# In a pointer (RFC 6901), of a list that fits into a schema.
INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
# Before a schema in a grammar.
IN_GRAMMAR = re.compile(r"%json\s*(?=\{)")


class UnservedSchema(ValueError):
    """The schema cannot be served; the message begins with the keyword."""


def served_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema as the library serves it. Raises UnservedSchema.

    One that is no schema is returned as it is: the library says what is wrong with it.
    """
    try:
        _check_references(schema)
        found: dict[str, Any] = _told(schema)
    except RecursionError:
        raise UnservedSchema("is nested too deeply") from None
    except (TypeError, AttributeError):
        return schema
    return found


def served_grammar(grammar: str) -> str:
    """A Lark grammar with each schema in it (`%json`) likewise."""
    parts, at, decoder = [], 0, json.JSONDecoder()
    while (found := IN_GRAMMAR.search(grammar, at)) is not None:
        parts.append(grammar[at : found.end()])
        at = found.end()
        try:
            schema, end = decoder.raw_decode(grammar, at)
        except ValueError:  # the library says what is wrong with it, if it is a schema at all
            continue
        parts.append(json.dumps(served_schema(schema)))
        at = end
    return "".join([*parts, grammar[at:]])


def _mapped(schema: Json, told: Callable[[Json], Json]) -> dict[str, Any]:
    """The schema with each one within it as `told` tells it."""
    found = dict(schema)
    for name, value in schema.items():
        if name in OF_LIST and isinstance(value, list):
            found[name] = [told(each) for each in value]
        elif name in OF_NAMES and isinstance(value, dict):
            found[name] = {key: told(each) for key, each in value.items()}
        elif name in OF_ONE:
            found[name] = told(value)
    return found


def _told(schema: Json) -> Json:
    if not isinstance(schema, dict):
        return schema
    _check_count(schema)
    found = _mapped(schema, _told)
    if found.get("type") != "integer":
        _tell_bound(found, "exclusiveMinimum", "minimum", NEXT, max)
        _tell_bound(found, "exclusiveMaximum", "maximum", -NEXT, min)
    form = found.get("format")
    if isinstance(form, str) and form in OF_FORMAT:
        found["allOf"] = [*found.get("allOf", ()), {"pattern": OF_FORMAT[form]}]
    return found


def _tell_bound(
    schema: dict[str, Any], exclusive: str, inclusive: str, step: float, nearer: Callable[[float, float], float]
) -> None:
    bound, other = schema.get(exclusive), schema.get(inclusive)
    if not _is_number(bound) or abs(bound) >= MOST_EXACT or bound != int(bound):
        return
    if other is None or _is_number(other):
        del schema[exclusive]
        schema[inclusive] = bound + step if other is None else nearer(other, bound + step)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_count(schema: Mapping[str, Any]) -> None:
    """Names that are not declared may come twice, and count once: of those one at most is known to be another one."""
    least, required = schema.get("minProperties"), schema.get("required", [])
    if "enum" in schema or "const" in schema or not isinstance(least, int) or not isinstance(required, list):
        return
    if least > len(required) + 1:
        raise UnservedSchema(f"minProperties: {least} is not served where {len(required)} are required")


# ----------------------------------------------------------------------------------------------------------------------
# References that lead to no finite document: a text that goes there never ends.


def _check_references(schema: dict[str, Any]) -> None:
    targets: dict[str, Json] = {}
    left = list(_references(schema))
    while left:
        reference = left.pop()
        if reference not in targets:
            targets[reference] = _resolved(schema, reference)
            left += _references(targets[reference])
    endless, before = set(targets), -1
    while len(endless) != before:
        before = len(endless)
        endless = {each for each in endless if not _ends(targets[each], endless)}
    if endless:
        raise UnservedSchema(f"$ref: no finite document fits {min(endless)}")


def _references(schema: Json) -> Iterator[str]:
    """Of all that a document may be held against."""
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("$ref"), str):
        yield schema["$ref"]
    found: list[str] = []

    def look(inner: Json) -> Json:
        found.extend(_references(inner))
        return inner

    _mapped({name: value for name, value in schema.items() if name not in DEFINITIONS}, look)
    yield from found


def _resolved(schema: Json, reference: str) -> Json:
    """What a pointer leads to; {} for what is no pointer, or leads nowhere: the library deals with that."""
    if reference != "#" and not reference.startswith("#/"):
        return {}
    found = schema
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return {}
    return found


def _ends(schema: Json, endless: set[str]) -> bool:
    """Whether some document fits that follows none of these references."""
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return True
    if schema.get("$ref") in endless or not all(_ends(each, endless) for each in _listed(schema, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        several = _listed(schema, name)
        if several and not any(_ends(each, endless) for each in several):
            return False
    types = schema.get("type")
    match types:
        case "object" | ["object"]:
            return _object_ends(schema, endless)
        case "array" | ["array"]:
            return _array_ends(schema, endless)
    return True


def _listed(schema: Mapping[str, Any], name: str) -> list[Json]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _object_ends(schema: Mapping[str, Any], endless: set[str]) -> bool:
    declared = schema.get("properties", {})
    required, others = _listed(schema, "required"), schema.get("additionalProperties", True)
    needed = [declared[name] for name in required if isinstance(name, str) and name in declared]
    if not all(_ends(each, endless) for each in needed):
        return False
    least = schema.get("minProperties", 0)
    may_be = [*declared.values(), *schema.get("patternProperties", {}).values(), others]
    return least <= len(required) or any(_ends(each, endless) for each in may_be)


def _array_ends(schema: Mapping[str, Any], endless: set[str]) -> bool:
    least, first, rest = schema.get("minItems", 0), _listed(schema, "prefixItems"), schema.get("items", True)
    if isinstance(rest, list):
        first, rest = rest, schema.get("additionalItems", True)
    needed = [*first[:least], *([rest] if least > len(first) else [])]
    return all(_ends(each, endless) for each in needed)
