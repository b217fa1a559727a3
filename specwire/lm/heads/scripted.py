"""A head for scripted models: what it says is known, and so is how often it is right."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from itertools import count

import torch

from specwire.core.draft import DraftingModel, DraftRow, HeadRequest
from specwire.core.model import Feed, ModelError
from specwire.lm.guesses import draw
from specwire.lm.scripted import CONTEXT, Metronome, Place, Script, ScriptedLM


class HeadedScript(ScriptedLM, DraftingModel):
    """A scripted target, behind whose texts another script drafts: `head`, or its own, which is always right.

    As a head does, it reads what its slots hold before it drafts behind it. A forward takes as long as a drafter's that
    plays the same script.
    """

    def __init__(self, script: Script, slots: int, context: int = CONTEXT, head: Script | None = None) -> None:
        super().__init__(script, slots, context)
        self.head = script if head is None else head
        if self.head.vocab != script.vocab:
            raise ModelError(f"heads: of {self.head.vocab} ids, beside a target of {script.vocab}")
        self._read = [0] * slots
        self._stopped = False
        self._head_clock = Metronome()

    @classmethod
    def beside(cls, spec: str, head: str, *, slots: int, context: int | None = None) -> HeadedScript:
        """Of what `Script.parse` reads."""
        lone = ScriptedLM.parse(spec, slots=slots, context=context)
        return cls(lone.script, slots, lone.info.context, Script.parse(head))

    # The target's slots

    def rollback(self, slot: int, length: int) -> None:
        super().rollback(slot, length)
        self._cut(slot, length)

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        super().keep(slot, start, rows)
        self._cut(slot, start)

    def discard(self, slot: int) -> None:
        super().discard(slot)
        self._cut(slot, 0)

    def copy(self, source: int, target: int, length: int) -> None:
        super().copy(source, target, length)
        self._read[target] = min(self._read[source], length)

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        rows = super().forward(feeds)
        for feed in feeds:
            self._cut(feed.slot, feed.start)
        return rows

    def _cut(self, slot: int, length: int) -> None:
        self._read[slot] = min(self._read[slot], length)

    # The head's

    def unread(self, slot: int) -> int | None:
        return None if self._stopped else self.cached(slot) - self._read[slot]

    def heed(self, slots: Collection[int] | None) -> None:
        """It reads what the slots hold; nothing is kept for it."""

    def skip(self, slot: int, left: int) -> None:
        """To read is free, so that all is read."""

    def catch_up(self, requests: Sequence[HeadRequest]) -> None:
        for request in requests:
            self._read[request.slot] = self.cached(request.slot)

    def stop(self) -> None:
        self._stopped = True

    def draft(self, requests: Sequence[HeadRequest]) -> list[list[int]]:
        """Behind each text as many tokens as are asked for, or as fit into the context.

        ValueError unless exactly what is before a text's last token is cached.
        """
        for request in requests:
            if self.cached(request.slot) != len(request.tokens) - 1:
                held = self.cached(request.slot)
                raise ValueError(f"tokens: slot {request.slot} holds {held} positions of {len(request.tokens)}")
        self.catch_up(requests)
        prefixes = [self._prefix(request) for request in requests]
        drafted: list[list[int]] = [[] for _ in requests]
        for depth in count():
            live = [at for at, request in enumerate(requests) if depth < self._most(request)]
            if not live:
                break
            began = time.perf_counter()
            positions = [len(requests[at].tokens) + depth for at in live]
            places = [Place(prefixes[at], position, True) for at, position in zip(live, positions, strict=True)]
            rows = [DraftRow(p, requests[at].sampling) for at, p in zip(live, positions, strict=True)]
            logits = torch.from_numpy(self.head.rows(places))
            for at, token in zip(live, draw(logits, rows), strict=True):
                drafted[at].append(token)
                prefixes[at] = self.head.extend(prefixes[at], token)
            self.spend(began, len(live))
        return drafted

    def spend(self, began: float, sessions: int) -> None:
        """Let the head's forward take its time. began: by `time.perf_counter`."""
        if self.head.delay_ms:
            self._head_clock.wait_until(began + self.head.duration(sessions))

    def _prefix(self, request: HeadRequest) -> int:
        """The hash of its text, from what the slot holds: wrong where that is of another text."""
        held = self._rows[request.slot]
        return self.head.extend(held[-1].prefix if held else 0, request.tokens[-1])

    def _most(self, request: HeadRequest) -> int:
        return min(request.depth, self.info.context - len(request.tokens))
