"""A constraint on the wire: one member of Sampling's oneof."""

from __future__ import annotations

from specwire.core.constraint import Constraint, ConstraintKind
from specwire.v1 import common_pb2


def constraint_to_wire(constraint: Constraint | None) -> common_pb2.Sampling:
    """A Sampling that says nothing else."""
    if constraint is None:
        return common_pb2.Sampling()
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return common_pb2.Sampling(json_schema=constraint.text)
        case ConstraintKind.REGEX:
            return common_pb2.Sampling(regex=constraint.text)
        case ConstraintKind.CHOICES:
            return common_pb2.Sampling(choices=common_pb2.Choices(texts=constraint.texts))
        case ConstraintKind.GRAMMAR:
            return common_pb2.Sampling(grammar=constraint.text)


def constraint_from_wire(message: common_pb2.Sampling) -> Constraint | None:
    """Raises InvalidParameter."""
    match message.WhichOneof("constraint"):
        case "json_schema":
            return Constraint(ConstraintKind.JSON_SCHEMA, (message.json_schema,))
        case "regex":
            return Constraint(ConstraintKind.REGEX, (message.regex,))
        case "choices":
            return Constraint(ConstraintKind.CHOICES, tuple(message.choices.texts))
        case "grammar":
            return Constraint(ConstraintKind.GRAMMAR, (message.grammar,))
        case _:
            return None
