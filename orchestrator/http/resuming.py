"""Where a reader of a stream stands, so that it can come back: the id of an event.

It says for each of the request's sessions POSITION-HASH-END-STAGE, commas between them, nothing for one that the reader
has not heard of. The hash is that of the text before the position (PROTOCOL.md, section 4): a reader that has another
text is told so. Without END and STAGE, as it was written once, nothing is known of offsets, and the end is told again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from specwire.core.sampling import InvalidParameter
from specwire.core.text import extend_hash
from specwire.v1 import generation_pb2 as pb

FORM = re.compile(r"([0-9]{1,10})-([0-9a-f]{16})(?:-([0-9]{1,10})-([0-4]))?")
FIELD = "Last-Event-ID"
MOST_WHOLE = (1 << 32) - 1


class Stage(IntEnum):
    """What a reader has beside the text that came with the tokens before its position."""

    OPENED = 0  # nothing, not even what its text begins with (`echo`)
    GOING = 1  # that
    COMPLETE = 2  # and what the end has released
    ENDED = 3  # and why it ended
    COUNTED = 4  # and the usage of all


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """The text before `position`, absolute, has this hash. end: where its last token's text ends in the output."""

    position: int
    hash: int
    end: int = 0
    stage: Stage = Stage.GOING

    @classmethod
    def start(cls, started: pb.Started) -> StreamPlace:
        return cls(started.prompt_tokens, started.prompt_hash, 0, Stage.OPENED)

    @property
    def reached(self) -> tuple[int, int]:
        return self.position, self.hash

    def behind(self, chunk: pb.Chunk) -> StreamPlace:
        """Where a reader stands that has this chunk, too."""
        value = self.hash
        for token in chunk.tokens:
            value = extend_hash(value, token)
        end = chunk.text_ends[-1] if chunk.text_ends else self.end
        return StreamPlace(chunk.position + len(chunk.tokens), value, end)

    def __str__(self) -> str:
        return f"{self.position}-{self.hash:016x}-{self.end}-{self.stage.value}"


def written(places: Iterable[StreamPlace | None]) -> str:
    """The id of an event whose reader stands there."""
    return ",".join("" if place is None else str(place) for place in places)


def parse(text: str, sessions: int) -> list[StreamPlace | None]:
    """A place for each session, None where the reader has not heard of it. Raises InvalidParameter."""
    parts = text.split(",")
    if len(parts) != sessions:
        raise InvalidParameter(FIELD, f"is of {len(parts)} sessions, and the request makes {sessions}")
    return [_place(part) if part else None for part in parts]


def _place(text: str) -> StreamPlace:
    found = FORM.fullmatch(text)
    if found is None:
        raise _no_id()
    position, value, end, stage = found.groups(default="")
    place = StreamPlace(int(position), int(value, 16), int(end or 0), Stage(int(stage)) if stage else Stage.GOING)
    if max(place.position, place.end) > MOST_WHOLE:
        raise _no_id()
    return place


def _no_id() -> InvalidParameter:
    return InvalidParameter(FIELD, "must be the id of an event of this stream")
