"""Real models in float32, through every row of the matrix: the text is the target's own, up to near-ties."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
from tokenizers import Tokenizer

from bench.soak.checks import mismatches
from bench.soak.jobs import Job, Manner, SoakPair, demo
from demo_pair import DRAFT, TARGET, held_out_prompts
from specwire.core.messages import FinishReason
from specwire.lm import load_model
from specwire.rpc.process import say
from tests.faults.matrix import CELLS, STOPPED_S, Cell
from tests.faults.place import Place, place
from tests.faults.scene import Asked, Scene
from tests.faults.scene import Manner as Played

# With the prompt it fits into the context, and lasts for some seconds.
LENGTH, CONTEXT = 700, 1024
WORDS = ("--dtype", "float32", "--threads", "1", "--slots", "8", "--context", str(CONTEXT))
# In `make test`: another verifier makes its cache from the log, and goes on with logits of its own.
QUICK = ("verifier", "SIGKILL")
PARAMETERS = [
    pytest.param(cell, id=cell.name, marks=() if (cell.where, cell.fault) == QUICK else pytest.mark.whole_matrix)
    for cell in CELLS
]


@pytest.fixture(scope="module")
def running() -> Iterator[Place]:
    """Give the processes, which are gone afterwards."""
    with place(str(TARGET), str(DRAFT), *WORDS) as present:
        yield present


@cache
def target() -> SoakPair:
    """What judges the texts."""
    return replace(demo(), reference=lambda: load_model(str(TARGET), slots=1, dtype="float32", context=CONTEXT))


@cache
def asked(count: int = 2) -> Sequence[Asked]:
    """Greedy and coupled in turn, at once."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(prompt.text).ids) for prompt in held_out_prompts()[:count]]
    return tuple(Asked(each, 0.8, seed=5) if at % 2 else Asked(each) for at, each in enumerate(prompts))


@pytest.mark.parametrize("cell", PARAMETERS)
def test_a_fault(running: Place, cell: Cell) -> None:
    play(running, cell)


def play(running: Place, cell: Cell, stopped_s: float = STOPPED_S) -> None:
    """Each token is what the target chooses behind those before it: by induction, plain decoding's text."""
    running.mend()
    scene = Scene(running, cell, asked(), Played(length=LENGTH, left=False, stopped_s=stopped_s))
    scene.play()
    scene.check_pause()
    for one, stream in zip(asked(), scene.streams, strict=True):
        assert stream.error is None
        assert stream.finished is not None
        assert stream.finished.reason is FinishReason.LENGTH
        assert len(stream.tokens) == LENGTH
        assert list(running.log(stream.session_id).tokens) == stream.tokens
        check_choices(one, stream.tokens)
    for service in running.services:
        assert "Traceback" not in service.said()


def check_choices(one: Asked, tokens: Sequence[int]) -> None:
    """Behind a near-tie the text is another one, and valid (docs/EXACTNESS.md)."""
    job = Job(0, one.prompt, LENGTH, one.sampling, True, (), "", Manner.READ, 0, (), False)
    for wrong in mismatches(target(), job, tokens):
        say(f"near-tie: {wrong}")
        assert wrong.gap <= target().tie, str(wrong)
