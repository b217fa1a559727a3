"""pytest's plugin with which tests of llama.cpp and vLLM, which start a server of their own, ask ours instead.

`tests.conformance` loads it, by this name and not as a part of `tests`: vLLM's archive has such a package, too.
Requests go to SPECWIRE_URL, for the model SPECWIRE_MODEL. Tests that ask no server are left out: they look into vLLM.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock
from urllib.parse import urlsplit

import openai
import pytest
import requests
from openai._models import FinalRequestOptions

URL, MODEL = os.environ["SPECWIRE_URL"], os.environ["SPECWIRE_MODEL"]
# Packages that they import, and use where no server is asked or for what is given below.
ABSENT = re.compile(r"(vllm|wget|fastapi|pybase64)(\..*)?|tests\.utils")
# What llama.cpp serves without /v1 as well.
SHORT = re.compile(r"^(?=/(chat/completions|completions|responses|models)\b)")
ANSWER_LIMIT_S = 90.0
# SmolLM2's tokens.
VOCABULARY = 49_152


class RunningServer:
    """As vLLM's tests know theirs, whatever options they start it with."""

    def __init__(self, *_: object, **__: object) -> None:
        self.url_root = URL

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([URL, *parts])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        known = {"base_url": self.url_for("v1"), "api_key": "any", "max_retries": 0, "timeout": ANSWER_LIMIT_S}
        return known | options


class ModelConfig:
    def __init__(self, **_: object) -> None:
        pass

    def get_vocab_size(self) -> int:
        return VOCABULARY


class AnyModule(ModuleType):
    RemoteOpenAIServer = RunningServer
    ROCM_EXTRA_ARGS: ClassVar[list[str]] = []
    ModelConfig = ModelConfig

    def __getattr__(self, name: str) -> Any:
        return MagicMock(name=name)


class Absent(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if ABSENT.fullmatch(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return AnyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def for_ours(body: Any) -> Any:
    """For the model that is served, where a request names one."""
    return body | {"model": MODEL} if isinstance(body, dict) and "model" in body else body


def of_requests(send: Callable[..., requests.Response]) -> Callable[..., requests.Response]:
    def request(session: requests.Session, method: str, url: str, **options: Any) -> requests.Response:
        options["json"] = for_ours(options.get("json"))
        return send(session, method, URL + SHORT.sub("/v1", url.removeprefix(URL)), **options)

    return request


def of_openai(_: openai.OpenAI, options: FinalRequestOptions) -> FinalRequestOptions:
    options.json_data = for_ours(options.json_data)
    return options


async def of_openai_async(client: openai.AsyncOpenAI, options: FinalRequestOptions) -> FinalRequestOptions:
    return of_openai(client, options)  # type: ignore[arg-type]


def pytest_collection_modifyitems(config: pytest.Config, items: list[Any]) -> None:
    kept = []
    for each in items:
        if hasattr(each.module, "ServerPreset"):
            each.module.ServerPreset.load_all = lambda: None
            kept.append(each)
        elif {"client", "server"} & {*each.fixturenames} or "RemoteOpenAIServer" in each.function.__code__.co_names:
            kept.append(each)
    config.hook.pytest_deselected(items=[each for each in items if each not in kept])
    items[:] = kept


# Before their files are imported. llama.cpp's tests know of servers that others have started.
sys.meta_path.insert(0, Absent())
os.environ |= {"DEBUG_EXTERNAL": "1", "PORT": str(urlsplit(URL).port)}
requests.Session.request = of_requests(requests.Session.request)  # type: ignore[method-assign]
openai.OpenAI._prepare_options = of_openai  # type: ignore[assignment, method-assign]
openai.AsyncOpenAI._prepare_options = of_openai_async  # type: ignore[assignment, method-assign]
