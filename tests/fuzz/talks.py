"""What peers say to each other that begins well: sessions that are taken in, guesses that fit, under every rule.

Messages of which every field is chosen by itself seldom get so far. What comes behind the good beginning is anything.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from specwire.core.text import hash_of
from specwire.v1 import common_pb2, draft_pb2, generation_pb2, verify_pb2
from tests.faults.streams import PROMPT
from tests.fuzz.messages import Pools, encoded, messages
from tests.fuzz.services import CONTEXT, VOCABULARY

HANDLE, EPOCH = 1, 7
WARM = 0.9
# By temperature: those that a session may have there.
RULES = {
    0.0: ["", "greedy", "threshold(0.3)", "typical(0.09,0.3)"],
    WARM: ["", "coupled", "rejection", "block", "threshold(0.3)", "typical(0.09,0.3)"],
}
WEIGHED = ("rejection", "block")
ODD_RULES = ["threshold", "threshold(2)", "threshold(nan)", "typical(0.1)", "typical(1e-9,9e99)", "block()", "\0"]
MOST_MESSAGES = 4
# What an output may be held to, by the name of its field; some are no such thing, or want far too much.
FORMS: dict[str, list[str]] = {
    "json_schema": [
        *('{"type": "object"}', '{"type": "integer"}', "true", "{}", "{", "[]", "1" * 400, '{"type": "nothing"}'),
        *('{"$ref": "#"}', '{"$ref": "http://x/y"}', '{"enum": []}', '{"maxItems": 1e99, "type": "array"}'),
        '{"anyOf": [' * 200 + "{}" + "]}" * 200,
    ],
    "regex": ["[0-9 ]+", "5( 6)*", "(a+)+$", "a{1,1000000000}", "(", "", "(?=x)", "\\p{L}+", "\0"],
    "grammar": ['start: "5" | "6"', "start: start", "start: NAME", "", 'start: "a"{1,99999999}', "%import common.INT"],
}
forms = st.one_of(*(st.tuples(st.just(name), st.sampled_from(texts)) for name, texts in FORMS.items()))
ONE_OF_SIX = 3

tokens = st.integers(0, VOCABULARY - 1)
chains = st.lists(tokens, min_size=1, max_size=16)


@st.composite
def weights(draw: st.DrawFn, token: int | None = None) -> common_pb2.DraftWeights:
    """What a token may have been drawn from; `token` is among the ids."""
    ids = draw(st.lists(tokens, min_size=1, max_size=5, unique=True))
    if token is not None and token not in ids:
        ids[0] = token
    sizes = st.one_of(st.integers(1, 100), st.sampled_from([1, 1 << 20, (1 << 31) - 200]))
    return common_pb2.DraftWeights(ids=ids, weights=[draw(sizes) for _ in ids])


@st.composite
def proposals(draw: st.DrawFn, pools: Pools) -> common_pb2.Proposal:
    """Three of four have weights that fit their tokens, every other parents that do; those of a few are possible."""
    proposal = draw(messages(common_pb2.Proposal, pools))
    if draw(st.integers(0, 3)):
        del proposal.weights[:]
        proposal.weights.extend(draw(weights(token)) for token in proposal.tokens)
    if draw(st.booleans()):
        del proposal.parents[:]
        proposal.parents.extend(draw(distances(len(proposal.tokens), proposal.offset)))
    return proposal


@st.composite
def distances(draw: st.DrawFn, nodes: int, offset: int) -> list[int]:
    """Of a tree's nodes to their parents: 0 and beyond -1 are impossible."""
    return [draw(st.integers(0, min((1 << 32) - 1, offset + index + 2))) for index in range(nodes)]


@st.composite
def samplings(draw: st.DrawFn) -> common_pb2.Sampling:
    temperature = draw(st.sampled_from(sorted(RULES)))
    rule = draw(st.sampled_from(RULES[temperature]))
    sampling = common_pb2.Sampling(
        temperature=temperature, rule=rule, seed=draw(st.integers(0, 8)), logprobs=draw(st.sampled_from([None, 0, 3]))
    )
    if draw(st.sampled_from(range(6))) == ONE_OF_SIX:
        name, text = draw(forms)
        setattr(sampling, name, text)
    return sampling


@st.composite
def trees(draw: st.DrawFn, nodes: int) -> list[int]:
    """How far before each of so many nodes its parent stands; of a chain nothing is said."""
    branches = [draw(st.integers(1, number + 1)) for number in range(nodes)]
    return draw(st.sampled_from([[], branches]))


@st.composite
def first_proposals(draw: st.DrawFn, sampling: common_pb2.Sampling) -> common_pb2.Proposal:
    """A chain or a tree right behind the prompt."""
    chain = draw(chains)
    return common_pb2.Proposal(
        handle=HANDLE,
        source=draw(st.integers(1, 3)),
        chain=draw(st.integers(1, 3)),
        base=len(PROMPT),
        tokens=chain,
        prefix_hash=hash_of(PROMPT),
        weights=[draw(weights(token)) for token in chain] if sampling.rule in WEIGHED else [],
        epoch=EPOCH,
        parents=draw(trees(len(chain))),
    )


@st.composite
def asking(draw: st.DrawFn, pools: Pools) -> list[bytes]:
    """Of an orchestrator: a completion, with a field or two that are anything."""
    stopping = common_pb2.Stopping(max_tokens=draw(st.integers(1, 30)), ignore_eos=True)
    request = generation_pb2.GenerateRequest(text="5 6 7", sampling=draw(samplings()), stopping=stopping)
    other = draw(messages(generation_pb2.GenerateRequest, pools))
    for name in draw(st.lists(st.sampled_from([field.name for field in request.DESCRIPTOR.fields]), max_size=2)):
        request.ClearField(name)
        request.MergeFrom(_only(other, name))
    return [request.SerializeToString()]


def _only(request: generation_pb2.GenerateRequest, name: str) -> generation_pb2.GenerateRequest:
    """The request with this field alone."""
    part = generation_pb2.GenerateRequest()
    part.CopyFrom(request)
    for field in request.DESCRIPTOR.fields:
        if field.name != name:
            part.ClearField(field.name)
    return part


drafters = st.builds(
    verify_pb2.Drafter,
    source=st.integers(0, 3),
    known_by=st.sampled_from(["", "a", "b"]),
    shares_cores=st.booleans(),
    plan=st.sampled_from(["", "auto", "off", "lockstep:2", "stream:1,8,2", "stream:2,4,0"]),
)


@st.composite
def deciding(draw: st.DrawFn, pools: Pools) -> list[bytes]:
    """To a verifier: a session, with chains and trees that fit it, then anything."""
    sampling = draw(samplings())
    opened = verify_pb2.Open(
        handle=HANDLE,
        session_id=str(draw(st.integers(0, 1 << 60))),
        tokens=PROMPT,
        prompt_length=len(PROMPT),
        sampling=sampling,
        stopping=common_pb2.Stopping(max_tokens=draw(st.integers(1, 20)), ignore_eos=True),
        progress=verify_pb2.Progress(durable=len(PROMPT), credit=draw(st.integers(4, CONTEXT))),
        vocabulary_fingerprint=draw(pools["vocabulary_fingerprint"]),
        epoch=EPOCH,
        cache_scope=draw(pools["cache_scope"]),
        prediction=draw(chains),
        priority=draw(pools["priority"]),
        reference_lengths=draw(pools["reference_lengths"]),
        drafters=draw(st.lists(drafters, max_size=3)),
    )
    chain = [draw(first_proposals(sampling)) for _ in range(draw(st.integers(1, 3)))]
    part = verify_pb2.ReferencePart(handle=HANDLE, tokens=draw(chains))
    said = verify_pb2.ConnectVerifyRequest(opens=[opened], proposals=chain, references=[part])
    return [said.SerializeToString(), *draw(_anything(verify_pb2.ConnectVerifyRequest, pools))]


@st.composite
def drafting(draw: st.DrawFn, pools: Pools) -> list[bytes]:
    """To a drafter: a session, an advance that fits it, then anything."""
    sizes = {"chunk": st.integers(1, 8), "run_ahead": st.integers(0, 16), "branches": st.sampled_from([0, 1, 4, 16])}
    pace = draft_pb2.Pace(**{name: draw(size) for name, size in sizes.items()})
    opened = draft_pb2.OpenDraft(
        handle=HANDLE,
        tokens=PROMPT,
        sampling=draw(samplings()),
        vocabulary_fingerprint=draw(pools["vocabulary_fingerprint"]),
        pace=pace,
        epoch=EPOCH,
        prompt_length=len(PROMPT),
    )
    advance = draft_pb2.Advance(handle=HANDLE, position=len(PROMPT), tokens=draw(chains), pace=pace, epoch=EPOCH)
    said = draft_pb2.ConnectDraftRequest(opens=[opened], advances=[advance])
    return [said.SerializeToString(), *draw(_anything(draft_pb2.ConnectDraftRequest, pools))]


def _anything(kind: Any, pools: Pools) -> st.SearchStrategy[list[bytes]]:
    return st.lists(encoded(kind, pools), max_size=MOST_MESSAGES - 1)
