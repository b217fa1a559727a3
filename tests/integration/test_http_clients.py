"""Others' clients of OpenAI's API, unmodified, as processes: litellm, `llm`, LangChain, pydantic-ai, an agent.

The agent is mini-SWE-agent, which edits files by a shell that it has as a tool. aider 0.86.2 pins each of its 108
requirements, litellm and openai among them, to versions that the others here have left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.http.front import HERMES, MODEL, Front, another, front
from tests.orchestrator.stack import DRAFT, PROMPT, SLOW_TARGET, TARGET, plain
from tests.orchestrator.tiny import tiny

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

# A tool that must be called, its outcome in the next turn, the call as it comes.
LANGCHAIN = """
import sys
from typing import Annotated
from pydantic import Field
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:]


@tool
def weather(city: Annotated[str, Field(max_length=6)], days: Annotated[int, Field(ge=0, le=9)]) -> str:
    "The weather of a city."
    return "warm"


chat = ChatOpenAI(base_url=url, api_key="any", model=model, max_tokens=200, temperature=0.7, seed=5, max_retries=0)
bound = chat.bind_tools([weather], tool_choice="weather", strict=True)
talk = [HumanMessage("How warm is it?")]
called = bound.invoke(talk)
(call,) = called.tool_calls
print(call["name"], sorted(call["args"]), type(call["args"]["city"]), type(call["args"]["days"]))
whole = None
for part in bound.stream(talk):
    whole = part if whole is None else whole + part
print([each["args"] for each in whole.tool_calls] == [call["args"]])
talk += [called, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
print(type(chat.bind_tools([weather], tool_choice="none").invoke(talk).content))
"""

# An output that a tool must give: what the model writes is a call of it, which meets its schema or is asked for again.
PYDANTIC_AI = """
import sys
from typing import Literal
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, model = sys.argv[1:]


class Weather(BaseModel):
    city: str = Field(max_length=6)
    unit: Literal["C", "F"]
    degrees: int | None


provider = OpenAIProvider(base_url=url, api_key="any")
settings = {"max_tokens": 300, "temperature": 0.7, "seed": 5}
agent = Agent(OpenAIChatModel(model, provider=provider), output_type=Weather, retries=0, model_settings=settings)
done = agent.run_sync("How warm is it?")
print(type(done.output).__name__, done.output.unit in "CF", done.usage().requests)
"""

# The model writes this call at each turn: the first makes a file, the second finds it and ends the task with it.
COMMAND = "test -e made && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat made || echo well done > made"
AGENT: dict[str, Any] = {
    "agent": {
        "system_template": "You have a shell.",
        "instance_template": "{{task}}",
        "mode": "yolo",
        "confirm_exit": False,
        "step_limit": 4,
        "cost_limit": 0,
    },
    "environment": {"environment_class": "local"},
    "model": {"cost_tracking": "ignore_errors"},
}

LLM_MODELS = """
- model_id: wire
  model_name: {model}
  api_base: {url}/v1
"""


@pytest.fixture(scope="module")
def door() -> Iterator[Front]:
    with front(SLOW_TARGET, DRAFT) as running:
        yield running


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Before a tiny model, whose words mean nothing: a grammar sees to its calls."""
    folder = tmp_path_factory.mktemp("tiny")
    with front(tiny(folder / "target", 1)) as known, another(known, chat_template=HERMES) as door:
        yield door


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


def test_langchain(talking: Front) -> None:
    said = said_by(str(CLIENTS / "python"), "-c", LANGCHAIN, f"{talking.url}/v1", talking.model)
    called = "weather ['city', 'days'] <class 'str'> <class 'int'>"
    assert said.splitlines() == [called, "True", "<class 'str'>"]


def test_pydantic_ai(talking: Front) -> None:
    said = said_by(str(CLIENTS / "python"), "-c", PYDANTIC_AI, f"{talking.url}/v1", talking.model)
    assert said.splitlines() == ["Weather True 1"]


def test_an_agent_that_edits_files(talking: Front, tmp_path: Path) -> None:
    """Two turns: it runs the calls, and tells the model what became of them."""
    call = json.dumps({"name": "bash", "arguments": {"command": COMMAND}})
    more = {"guided_choice": [f"<tool_call>\n{call}\n</tool_call>"]}
    asked = {"api_base": f"{talking.url}/v1", "api_key": "any", "max_tokens": 200, "extra_body": more}
    config = {**AGENT, "model": {**AGENT["model"], "model_name": f"openai/{talking.model}", "model_kwargs": asked}}
    config["environment"] = {**config["environment"], "cwd": str(tmp_path)}
    (tmp_path / "agent.yaml").write_text(json.dumps(config))  # JSON is YAML
    told = tmp_path / "told.json"
    alone = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    arguments = ("-c", str(tmp_path / "agent.yaml"), "-t", "Make a file.", "-y", "--exit-immediately", "-o", str(told))
    said_by(str(CLIENTS / "mini"), *arguments, **alone)
    assert (tmp_path / "made").read_text() == "well done\n"
    run = json.loads(told.read_text())
    assert (run["info"]["exit_status"], run["info"]["submission"]) == ("Submitted", "well done\n")
    assert [each["role"] for each in run["messages"]].count("assistant") == 2
