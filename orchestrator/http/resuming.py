"""Where a reader of a stream stands, so that it can come back: the id of an event, POSITION-HASH.

The hash is that of the text before the position (PROTOCOL.md, section 4): a reader that has another text is told so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from specwire.core.sampling import InvalidParameter
from specwire.core.text import extend_hash
from specwire.v1 import generation_pb2 as pb

FORM = re.compile(r"([0-9]{1,10})-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class Place:
    """The text before `position`, absolute, has this hash."""

    position: int
    hash: int

    @classmethod
    def start(cls, started: pb.Started) -> Place:
        return cls(started.prompt_tokens, started.prompt_hash)

    @classmethod
    def parse(cls, text: str) -> Place:
        """Raises InvalidParameter."""
        found = FORM.fullmatch(text)
        if found is None:
            raise InvalidParameter("Last-Event-ID", "must be the id of an event of this stream, POSITION-HASH")
        return cls(int(found[1]), int(found[2], 16))

    def behind(self, chunk: pb.Chunk) -> Place:
        """Where a reader stands that has this chunk, too."""
        value = self.hash
        for token in chunk.tokens:
            value = extend_hash(value, token)
        return Place(chunk.position + len(chunk.tokens), value)

    def __str__(self) -> str:
        return f"{self.position}-{self.hash:016x}"
