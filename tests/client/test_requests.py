"""What the client itself refuses: values that the wire cannot carry."""

from __future__ import annotations

import pytest

from specwire.client import SpecwireError
from specwire.client.requests import RequestOptions, generate_request, watch_request
from specwire.v1 import generation_pb2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RequestOptions(max_tokens=-5), "max_tokens: must be from 0 to 4294967295, not -5"),
        (RequestOptions(top_k=-1), "top_k: must be from 0 to 4294967295, not -1"),
        (RequestOptions(seed=1 << 64), "seed: must be a whole number of 64 bits, not 18446744073709551616"),
        (RequestOptions(stop_ids=[3, -1]), "stop_ids: must be from 0 to 4294967295, not -1"),
        (RequestOptions(stop=["a", "\ud800"]), "stop: is not valid Unicode at index 0"),
        (RequestOptions(request_id="x\udc80"), "request_id: is not valid Unicode at index 1"),
    ],
)
def test_options_that_do_not_fit(options: RequestOptions, message: str) -> None:
    with pytest.raises(SpecwireError, match=f"INVALID_ARGUMENT: {message}"):
        generate_request("x", **options)


@pytest.mark.parametrize("prompt", [[-1], [1 << 32], "\udc80"])
def test_prompts_that_do_not_fit(prompt: str | list[int]) -> None:
    with pytest.raises(SpecwireError, match="INVALID_ARGUMENT: prompt: "):
        generate_request(prompt)


def test_watching_from_a_position_that_cannot_be() -> None:
    with pytest.raises(SpecwireError, match="from_position"):
        watch_request("s", -1, None)


def test_a_seed_is_sent_only_if_given() -> None:
    assert not generate_request("x").sampling.HasField("seed")
    assert generate_request("x", seed=0).sampling.HasField("seed")


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (RequestOptions(), generation_pb2.DRAFTING_AUTOMATIC),
        (RequestOptions(drafting=False), generation_pb2.DRAFTING_OFF),
        (RequestOptions(ngram=False), generation_pb2.DRAFTING_DRAFTERS),
        (RequestOptions(drafting=False, ngram=True), generation_pb2.DRAFTING_NGRAM),
    ],
)
def test_who_may_propose(options: RequestOptions, asked: generation_pb2.Drafting) -> None:
    assert generate_request("x", **options).drafting == asked


@pytest.mark.parametrize("named", [[], ["drafters"], ["ngram", "heads"], ["drafters", "ngram", "heads"]])
def test_which_sources_may_propose(named: list[str]) -> None:
    request = generate_request("x", sources=named)
    assert request.drafting == generation_pb2.DRAFTING_UNSPECIFIED
    assert request.HasField("sources")
    assert [field.name for field, _ in request.sources.ListFields()] == named
    assert not generate_request("x").HasField("sources")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RequestOptions(sources=["magic"]), r"must be a list of drafters, ngram, heads, not \['magic'\]"),
        (RequestOptions(sources="ngram"), "must be a list of drafters, ngram, heads, not 'ngram'"),
        (RequestOptions(sources=[], drafting=False), "contradicts drafting and ngram"),
        (RequestOptions(sources=["ngram"], ngram=True), "contradicts drafting and ngram"),
    ],
)
def test_sources_that_cannot_be_chosen(options: RequestOptions, message: str) -> None:
    with pytest.raises(SpecwireError, match=f"INVALID_ARGUMENT: sources: {message}"):
        generate_request("x", **options)
