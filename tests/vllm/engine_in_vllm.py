"""Our engine over vLLM's worker, held to a reference that knows neither windows nor slots: ``FOLDER``.

A tiny random model has memory for two texts. Every kind of option is asked for with right, wrong and no drafts, within
any credit; each text is opened again behind every one of its tokens, and gives up its slot there. Nothing of a
forgotten session is left, and nothing is shared between tenants.

Run by the environment that `make setup-vllm` makes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedModel

from specwire.core.law.acceptance import choose
from specwire.core.law.sampling import History, LogprobsOf, Sampling, log_probabilities, report
from specwire.core.messages import FinishReason, TokenLogprobs
from specwire.core.text import Stopping
from specwire.core.verify.session import Allowance
from specwire.lm import LanguageModel, load_model
from specwire.lm.kv_cache import CachedLM, position_bytes
from specwire.lm.runners.vllm import VllmRunner
from tests.lm.models import CONTEXT, VOCABULARY, build, plain, save
from tests.reference_target import close
from tests.verify_service.automaton import ASKED, Automaton, Walk
from tests.verify_service.rig import FAR, Rig, chain, opening
from tests.vllm.walk_in_vllm import OPTIONS, SIZES
from verify_service.engine.messages import Begun, QueuePatience
from verify_service.engine.sessions import PARK_AFTER_US

SLOTS, END, LENGTH = 2, 2, 14
# Longer than a forward of `OPTIONS` may be; repeats itself, so that penalties have something to do.
PROMPT = (5, 6, 7, 5, 8, 6, 7, 5, 9, 6, 7)
# A third of the ids may follow each state, and none ends the text but in the second one.
RING = Automaton(
    [{token: (at + 1) % 3 for token in range(3, VOCABULARY) if token % 3 == at} for at in range(3)],
    frozenset({1}),
    VOCABULARY,
    END,
)


@dataclass(frozen=True)
class Asked:
    """What is asked for, and the constraint, if any, that `sampling` names."""

    sampling: Sampling = Sampling()
    stopping: Stopping = Stopping(LENGTH)
    automaton: Automaton | None = None


ASKS = {
    "greedy": Asked(),
    "reported": Asked(Sampling(repetition_penalty=1.4, logprobs=3)),
    "coupled": Asked(Sampling(0.9, seed=5, logprobs=2), Stopping(LENGTH, ignore_eos=True)),
    "filtered": Asked(
        Sampling(1.5, top_k=20, top_p=0.8, min_p=0.02, seed=7, choice=2, logit_bias=((7, 3.0), (9, -9.0)))
    ),
    "penalised": Asked(
        Sampling(
            0.8, seed=3, presence_penalty=0.5, frequency_penalty=0.4, logprobs=1, logprobs_of=LogprobsOf.PROCESSED
        ),
        Stopping(LENGTH, frozenset({10, 11}), min_tokens=9),
    ),
    "eager to end": Asked(
        Sampling(logit_bias=((END, 40.0), (3, 30.0))), Stopping(LENGTH, frozenset({3}), min_tokens=6)
    ),
    "constrained": Asked(Sampling(1.2, seed=9, constraint=ASKED), Stopping(LENGTH, min_tokens=5), RING),
    "constrained, greedy": Asked(Sampling(repetition_penalty=1.2, constraint=ASKED), Stopping(LENGTH), RING),
}


@dataclass(frozen=True)
class Expected:
    tokens: list[int]
    reports: list[TokenLogprobs]
    reason: FinishReason


def alone(model: PreTrainedModel, asked: Asked, prompt: Sequence[int] = PROMPT) -> Expected:
    """What the model decides by the reference rules, its logits counted anew behind each text."""
    output: list[int] = []
    reports: list[TokenLogprobs] = []
    sampling, stopping = asked.sampling, asked.stopping
    ends = stopping.stop_ids | (frozenset() if stopping.ignore_eos else {END})
    while True:
        logits = plain(model, [*prompt, *output])[-1].double().numpy()
        seen = History(prompt, output).seen() if sampling.penalised else None
        banned = tuple(ends) if len(output) < stopping.min_tokens else ()
        allowed = None if asked.automaton is None else asked.automaton.mask(asked.automaton.state(output) or 0)
        token = choose(logits, len(prompt) + len(output), sampling, seen, banned, allowed)
        processed = () if sampling.logprobs_of is LogprobsOf.MODEL else (sampling, seen, banned)
        if sampling.logprobs is not None:
            reports.append(report(log_probabilities(logits, *(processed or (Sampling(),))), token, sampling.logprobs))
        output.append(token)
        if token in ends:
            return Expected(output, reports, FinishReason.EOS if token == END else FinishReason.STOP_ID)
        if len(output) == stopping.max_tokens:
            return Expected(output, reports, FinishReason.LENGTH)


class VllmRig(Rig):
    """An engine of its own over the one model, in which no earlier one has left anything. Nothing drafts by itself."""

    def __init__(self, lm: LanguageModel) -> None:
        for slot in range(lm.slots):
            lm.discard(slot)
        super().__init__(ngram=False, patience=QueuePatience(8, 60e6), beside=lambda _: lm)

    def begin(
        self, handle: int, asked: Asked, decided: Sequence[int] = (), prompt: Sequence[int] = PROMPT, **changes: Any
    ) -> None:
        fields: dict[str, Any] = {"link": handle, "sampling": asked.sampling, "decided": decided, **changes}
        link = fields.pop("link")
        opened = replace(opening(handle, prompt, **fields), stopping=asked.stopping)
        self.tick(link, opens=(opened,))
        if asked.automaton is not None:
            walk = Walk(asked.automaton)
            assert walk.take(decided) == len(decided)
            self.engine.inbox.put(Begun(link, handle, opened.generation, walk))

    def ended(self, handle: int, expected: Expected, held: int = 0) -> None:
        """Hold what was decided behind the first `held` tokens to what is expected, and close the session."""
        assert self.refused == []
        assert (self.tokens[handle], self.finished[handle]) == (expected.tokens[held:], expected.reason)
        told = [
            each
            for reported in self.reports
            for decided in reported.decided
            if decided.handle == handle
            for each in decided.verdict.logprobs
        ]
        assert close(told, expected.reports[held:])
        self.tick(handle, closes=(handle,))
        self.run()


Guess = Callable[[int], Sequence[int]]


def guesses(expected: Expected) -> list[Guess]:
    """Nothing, what follows, what never does, and what goes wrong behind two tokens."""
    tokens = expected.tokens
    wrong = [(token + 1) % VOCABULARY for token in tokens]
    return [
        lambda _: (),
        lambda done: tokens[done : done + 5],
        lambda done: wrong[done : done + 5],
        lambda done: [*tokens[done : done + 2], *wrong[done + 2 : done + 5]],
    ]


def write_with_drafts(lm: LanguageModel, asked: Asked, expected: Expected) -> None:
    """Credit comes one to four tokens at a time, and no token is decided beyond it, whatever a window could hold."""
    for more, guess in enumerate(guesses(expected), start=1):
        rig, credit = VllmRig(lm), len(PROMPT)
        rig.begin(1, asked, allowance=Allowance(0, credit))
        while 1 not in rig.finished:
            done = rig.tokens.get(1, [])
            if 1 in rig.tokens and (guessed := guess(len(done))):
                rig.propose(1, chain(len(done), [*PROMPT, *done], guessed), link=1)
            rig.run()
            assert len(PROMPT) + len(rig.tokens[1]) <= credit
            credit += more
            rig.tick(1, progress=((1, Allowance(len(PROMPT) + len(rig.tokens[1]), credit)),))
        rig.ended(1, expected)


def open_again_behind_every_token(lm: LanguageModel, asked: Asked, expected: Expected) -> None:
    """As another verifier's session, and as one of this engine's that had to leave: what it was told is its prompt."""
    rig = VllmRig(lm)
    for held in range(len(expected.tokens)):
        rig.begin(held + 1, asked, expected.tokens[:held], attach=2)
        rig.run()
        rig.ended(held + 1, expected, held)


def give_the_slot_up_behind_every_token(lm: LanguageModel, asks: Sequence[Asked], expected: Sequence[Expected]) -> None:
    """Two texts have all memory and no credit; two that come take it, and both go on where they were."""
    for held in range(1, min(len(each.tokens) for each in expected)):
        rig = VllmRig(lm)
        for handle, asked in enumerate(asks):
            rig.begin(handle, asked, allowance=Allowance(0, len(PROMPT) + held), scope=b"a")
        rig.run()
        for handle in (8, 9):
            rig.begin(handle, Asked(stopping=Stopping(3, ignore_eos=True)), prompt=(9, handle), scope=b"b")
        rig.run()
        assert 8 not in rig.tokens
        rig.now += PARK_AFTER_US
        rig.run()
        assert len(rig.tokens[8]) == len(rig.tokens[9]) == 3
        assert [len(rig.tokens[handle]) for handle in range(SLOTS)] == [held] * SLOTS
        for handle in range(SLOTS):
            rig.tick(handle, progress=((handle, FAR),))
        rig.run()
        for handle, each in enumerate(expected):
            rig.ended(handle, each)


def share_within_a_tenant_only(lm: LanguageModel, model: PreTrainedModel) -> None:
    """A text's siblings and its next turn begin from what it left; nobody else does, and nothing is left in the end."""
    asked = Asked(Sampling(0.9, seed=5), Stopping(6, ignore_eos=True))
    sibling = replace(asked, sampling=replace(asked.sampling, choice=1))

    def written(rig: VllmRig, handle: int, asked: Asked, prompt: Sequence[int], scope: bytes) -> tuple[list[int], int]:
        rig.begin(handle, asked, prompt=prompt, scope=scope)
        rig.run()
        rig.ended(handle, alone(model, asked, prompt))
        cached = [each.cached for told in rig.reports for each in told.admitted if each.handle == handle]
        return rig.tokens[handle], cached[-1]

    rig = VllmRig(lm)
    said, cached = written(rig, 1, asked, PROMPT, b"a")
    assert cached == 0
    assert written(rig, 2, sibling, PROMPT, b"a")[1] == len(PROMPT) - 1
    turn = (*PROMPT, *said, 4, 4)
    assert written(rig, 3, asked, turn, b"a")[1] == len(PROMPT) + len(said) - 1
    assert written(rig, 4, asked, turn, b"b")[1] == 0
    rig.tick(4, forgotten=("session-4",))
    rig.run()
    assert written(rig, 5, asked, turn, b"b")[1] == 0
    rig.tick(5, forgotten=tuple(f"session-{handle}" for handle in range(1, 6)))
    rig.run()
    assert isinstance(lm, CachedLM)
    assert isinstance(lm.runner, VllmRunner)
    # Block 0 is vLLM's own.
    assert not any(bool(layer[1:].any()) for layer in lm.runner._model.kv_caches)


@torch.inference_mode()
def main(folder: Path) -> None:
    """Raises AssertionError where a text, its reports or its end are not the reference's."""
    config = LlamaConfig(**SIZES)
    model = build(config)
    # Blocks are whole, and two are vLLM's own: one less would hold a slot less.
    block = OPTIONS["block_size"] * position_bytes(config, torch.float32)
    memory = (SLOTS * -(-CONTEXT // OPTIONS["block_size"]) + 2) * block
    lm = load_model(save(model, folder), slots=64, kv_memory=memory, engine="vllm", engine_options=OPTIONS)
    assert lm.slots == SLOTS
    assert isinstance(lm, CachedLM)
    assert lm.runner.kv_bytes == memory
    expected = {name: alone(model, asked) for name, asked in ASKS.items()}
    assert {each.reason for each in expected.values()} == {
        FinishReason.LENGTH,
        FinishReason.STOP_ID,
        FinishReason.EOS,
    }, expected
    for name, asked in ASKS.items():
        write_with_drafts(lm, asked, expected[name])
        open_again_behind_every_token(lm, asked, expected[name])
    names = [*ASKS]
    for pair in zip(names[::2], names[1::2], strict=True):
        give_the_slot_up_behind_every_token(lm, [ASKS[name] for name in pair], [expected[name] for name in pair])
    share_within_a_tenant_only(lm, model)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
