"""Bodies of any kind: an answer or a refusal, never a failure of ours; afterwards the text is still the target's."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.orchestrator.http.front import CHAT, COMPLETIONS, Front
from tests.orchestrator.stack import PROMPT, TARGET, plain

JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 70), 1 << 70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
        st.sampled_from(["5 6", "\ud800", "x" * 3000, [5, 6], {"type": "content", "content": "5"}]),
        st.sampled_from([[{"type": "function", "function": {"name": "f"}}], "none", "required"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
FIELDS = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "stream",
    "stream_options",
    "echo",
    "best_of",
    "suffix",
    "prediction",
    "references",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "rule",
    "drafting",
    "request_id",
    "parent",
    "priority",
    "private",
    "logprobs_of",
    "details",
    "take_over",
    "response_format",
    "structured_outputs",
    "guided_regex",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "continue_final_message",
    "user",
    "metadata",
    "store",
    "chat_template_kwargs",
    "add_generation_prompt",
    "other",
]
PLAUSIBLE: dict[str, Any] = {"prompt": "5 6 7", "messages": [{"role": "user", "content": "5 6"}], "max_tokens": 3}


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from([COMPLETIONS, CHAT]), st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=3))
def test_any_body(door: Front, path: str, odd: dict[str, Any]) -> None:
    wanted = "prompt" if path == COMPLETIONS else "messages"
    body = {wanted: PLAUSIBLE[wanted], "max_tokens": 3, "timeout": 5, **odd}
    answer = door.client.post(path, content=json.dumps(body))
    assert answer.status_code in (200, 400, 404, 504), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_afterwards_the_text_is_the_targets(door: Front) -> None:
    answer = door.done(COMPLETIONS, prompt=list(PROMPT), max_tokens=20, temperature=0, ignore_eos=True)
    assert answer["choices"][0]["text"] == " ".join(map(str, plain(TARGET, PROMPT, 20)))
