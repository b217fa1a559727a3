"""What `specwire doctor` finds, one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from deploy.render import GREEN, RESET, YELLOW
from specwire.rpc.process import visible

RED = "\x1b[31m"


class Grade(StrEnum):
    """OK: as it should be. WARN: it works, with what the text says. BAD: what was asked for will not work."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


COLOURS = {Grade.OK: GREEN, Grade.WARN: YELLOW, Grade.BAD: RED}


@dataclass(frozen=True, slots=True)
class Finding:
    """topic: what was looked at. text: what is there. remedy: what to do, "" for nothing."""

    grade: Grade
    topic: str
    text: str
    remedy: str = ""


def ok(topic: str, text: str) -> Finding:
    return Finding(Grade.OK, topic, text)


def warn(topic: str, text: str, remedy: str) -> Finding:
    return Finding(Grade.WARN, topic, text, remedy)


def bad(topic: str, text: str, remedy: str) -> Finding:
    return Finding(Grade.BAD, topic, text, remedy)


def lines(findings: Sequence[Finding], colour: bool) -> str:
    """A line for each."""
    width = max((len(each.topic) for each in findings), default=0)
    return "\n".join(_line(each, width, colour) for each in findings)


def _line(finding: Finding, width: int, colour: bool) -> str:
    grade = finding.grade.ljust(max(map(len, Grade)))
    grade = f"{COLOURS[finding.grade]}{grade}{RESET}" if colour else grade
    remedy = f" -> {finding.remedy}" if finding.remedy else ""
    return f"{grade}  {visible(f'{finding.topic.ljust(width)}  {finding.text}{remedy}', lines=False)}"
