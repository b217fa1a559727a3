"""Other people's clients of OpenAI's API, unmodified, as processes: litellm and the `llm` command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.orchestrator.http.front import MODEL, Front, front
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, TARGET, plain

CLIENTS = Path(sys.prefix, "clients", "bin")
LIMIT_S = 200.0
WORDS = " ".join(map(str, PROMPT))
TOKENS = 8
WHOLE = " ".join(map(str, plain(TARGET, PROMPT, TOKENS)))

LITELLM = """
import sys
import litellm

url, words, model, tokens = sys.argv[1:]
common = {"api_base": url, "api_key": "any", "max_tokens": int(tokens), "temperature": 0}
talk = {"model": f"openai/{model}", "messages": [{"role": "user", "content": words}], **common}
done = litellm.completion(**talk)
print(done.choices[0].message.content, done.usage.completion_tokens, sep=": ")
parts = [chunk.choices[0].delta.content for chunk in litellm.completion(stream=True, **talk)]
print("".join(part or "" for part in parts))
print(litellm.text_completion(model=f"text-completion-openai/{model}", prompt=words, **common).choices[0].text)
try:
    litellm.completion(model="openai/none", messages=talk["messages"], **common)
except litellm.NotFoundError as error:
    print("not found")
for field, value in (("messages", [{"role": "user", "content": words * 3000}]), ("max_tokens", 5000)):
    try:
        litellm.completion(**{**talk, field: value})
    except litellm.ContextWindowExceededError as error:
        print("too long")
"""

LLM_MODELS = """
- model_id: wire
  model_name: {model}
  api_base: {url}/v1
"""


@pytest.fixture(scope="module")
def door() -> Iterator[Front]:
    with front(SLOW_TARGET, DRAFT) as running:
        yield running


def said_by(*command: str, **environment: str) -> str:
    """What the command, which must succeed, writes."""
    assert CLIENTS.exists(), f"{CLIENTS} is missing: make setup"
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_litellm(door: Front) -> None:
    """A chat, its stream, a completion, errors by their classes; without asking the network for prices."""
    python = str(CLIENTS / "python")
    arguments = (f"{door.url}/v1", WORDS, MODEL, str(TOKENS))
    said = said_by(python, "-c", LITELLM, *arguments, LITELLM_LOCAL_MODEL_COST_MAP="True")
    lines = [line for line in said.splitlines() if line[:1].isdigit() or line in ("not found", "too long")]
    assert lines == [f"{WHOLE}: {TOKENS}", WHOLE, WHOLE, "not found", "too long", "too long"]


def test_llm(door: Front, tmp_path: Path) -> None:
    """The command streams."""
    (tmp_path / "extra-openai-models.yaml").write_text(LLM_MODELS.format(model=MODEL, url=door.url))
    options = ("-o", "temperature", "0", "-o", "max_tokens", str(TOKENS))
    llm = str(CLIENTS / "llm")
    said = said_by(llm, "-m", "wire", WORDS, *options, LLM_USER_PATH=str(tmp_path), OPENAI_API_KEY="any")
    assert said.strip() == WHOLE
