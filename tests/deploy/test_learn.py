"""specwire learn: whose texts it reads, lines of files, what it says and writes, and what is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from deploy.cli.main import main
from deploy.cli.training.learn import FiledTexts, LoggedTexts, SessionText
from orchestrator.store import KnownSession, SessionRecord, SessionStore, StoreUnavailable, open_store
from orchestrator.store.redis import RedisStore
from specwire.core.invalid import InvalidParameter
from specwire.core.law.sampling import Sampling, with_rule
from specwire.core.messages import Append, End, FinishReason, Outcome
from specwire.core.text import Stopping
from specwire.versions import VersionFolder
from tests.lm import models
from tests.lm.training.test_online import ANOTHER, ONE_KIND, texts
from tests.orchestrator.redis_for_tests import RedisServer
from tests.orchestrator.redis_groups import cluster, cluster_url
from tests.ports import free_address
from tests.wait import LIMIT_S, eventually

TTL = 60.0
TOKENS = (7, 8, 9)
LOSSY = with_rule(Sampling(temperature=1.0), "threshold(0.1)")
ONE_PROCESS = "must be a Redis: a log in memory or in a file is read by the one process that has it"


@pytest.fixture(scope="module", params=["redis", "cluster"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "redis":
        with RedisServer() as server:
            yield server.url
    else:
        with cluster() as nodes:
            yield cluster_url(nodes)


async def written(store: SessionStore, session_id: str, ended: bool = True, **changes: Any) -> None:
    """A session that said TOKENS."""
    fields = {"prompt": (5, 6), "sampling": Sampling(), "stopping": Stopping(16), "vocabulary_fingerprint": "v"}
    record = SessionRecord(**{"session_id": session_id, **fields, **changes})
    fence = await store.create(record, TTL)
    end = End(FinishReason.CANCELLED, "", 3) if ended else None
    await store.append(session_id, fence, Append(2, TOKENS, (Outcome.DIRECT,) * 3, end))


def found(session_id: str) -> SessionText:
    return SessionText(session_id, (5, 6), TOKENS)


# Consent


async def test_of_tenants_that_agreed_only_and_never_private(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await open_store(url)
    names = iter(f"s{number}" for number in range(100))
    for tenant in ("alice", "bob", ""):
        await written(store, f"{next(names)}-{tenant}", tenant=tenant)
        await written(store, f"{next(names)}-{tenant}-private", tenant=tenant, private=True)
    read: list[str] = []
    reading = RedisStore.read

    async def noted(self: RedisStore, session_id: str) -> Any:
        read.append(session_id)
        return await reading(self, session_id)

    monkeypatch.setattr(RedisStore, "read", noted)
    for tenants, told in ((("alice",), ["s0-alice"]), (("*",), ["s4-"]), (("bob", "*"), ["s2-bob", "s4-"])):
        read.clear()
        fresh = await LoggedTexts(store, tenants, "v").fresh()
        assert sorted(each.session_id for each in fresh) == told
        assert sorted(read) == told, "of others not even the text is read"
    for session_id in [each.session_id async for each in store.known_sessions()]:
        await store.delete(session_id)
    await store.close()


async def test_what_ended_is_told_once_and_what_was_deleted_is_named(url: str) -> None:
    store = await open_store(url)
    logged = LoggedTexts(store, ["*"], "v")
    assert await logged.fresh() == []
    await written(store, "t-ended")
    await written(store, "t-running", ended=False)
    await written(store, "t-lossy", sampling=LOSSY)
    await written(store, "t-other", vocabulary_fingerprint="w")
    assert await logged.fresh() == [found("t-ended")]
    assert logged.left_out == {"decided by a lossy rule": 1, "of another vocabulary than the model's": 1}
    await written(store, "t-later")
    await store.delete("t-ended")
    assert await logged.fresh() == [found("t-later")]
    assert logged.deleted.count("t-ended") == 1
    known = {each.session_id: each async for each in store.known_sessions()}
    assert known["t-running"] == KnownSession("t-running", "running", ("", False))
    assert known["t-ended"] == KnownSession("t-ended", "deleted", None)
    await store.close()


async def test_a_log_that_does_not_answer_says_so() -> None:
    with RedisServer() as server:
        store = await open_store(server.url, timeout_s=0.5)
        server.pause()
        with pytest.raises(StoreUnavailable, match="the session log does not answer"):
            [each async for each in store.known_sessions()]
        server.resume()
        await store.close()


# Files


def test_lines_are_told_once_and_half_a_line_later(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    lines = [
        {"output": [7, 8, 9], "prompt": [5, 6], "session": "a"},
        {"text": "x y", "session": "b"},
        {"output": "z", "prompt": "x", "tenant": "alice", "session": "c"},
        {"output": [3]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '\n{"outp')
    filed = FiledTexts([file], ["*"], lambda text: [ord(each) for each in text.split()], 200)
    a, b, unnamed = filed.fresh()
    assert (a, b) == (found("a"), SessionText("b", (), (120, 121)))
    assert unnamed.output == (3,)
    assert len(unnamed.session_id) == 64
    assert filed.fresh() == []
    with file.open("a") as more:
        more.write('ut": [4], "session": "d"}\n')
    assert filed.fresh() == [SessionText("d", (), (4,))]
    assert [each.session_id for each in FiledTexts([file], ["alice"], lambda _: [1], 200).fresh()] == ["c"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("no", "line 2: "),
        ('{"prompt": [1]}', "line 2: has no output"),
        ('{"output": [200]}', r"line 2: token id 200 is outside 0\.\.199"),
        ('{"output": [-1]}', r"line 2: token id -1 is outside 0\.\.199"),
        ('{"output": [1], "tenannt": "a"}', "line 2: Object contains unknown field `tenannt`"),
        ('{"output": 7}', "line 2: Expected "),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(f'{{"output": [1]}}\n{line}\n')
    with pytest.raises(InvalidParameter, match=f"texts: {file}, {message}"):
        FiledTexts([file], ["*"], lambda _: [], 200).fresh()


# The command


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = models.build(LlamaConfig(**{**models.ROTARY, "initializer_range": 0.05}))
    return models.save(made, tmp_path_factory.mktemp("draft"), {f"w{id_}": id_ for id_ in range(50)})


def filed(path: Path, count: int, seed: int, kind: tuple[int, int] = ONE_KIND) -> str:
    with path.open("a") as file:
        for text in texts(kind, count, seed):
            file.write(json.dumps({"prompt": text.prompt, "output": text.output, "session": text.session}) + "\n")
    return str(path)


def command(draft: str, out: Path, *more: str) -> list[str]:
    options = ("--learn-from", "*", "--rate", "0.01", "--threads", "1")
    return ["learn", "--draft", draft, "--out", str(out), *options, *more]


def test_a_round_learns_says_what_it_did_and_publishes(
    draft: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = filed(tmp_path / "texts.jsonl", 75, 1)
    assert main(command(draft, tmp_path / "out", "--texts", file, "--once")) == 0
    current = VersionFolder(tmp_path / "out").current()
    assert current is not None
    assert (current.version, current.draft, current.tenants) == (1, draft, ("*",))
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "specwire learn: version 0 is in use"
    assert said[-1].startswith("specwire learn: round 1: 75 texts, ")
    assert said[-1].endswith("version 1 is in use: better")
    assert f"in use {current.before:.3f} (chain " in said[-1]
    assert f"learnt {current.after:.3f} (chain " in said[-1]


def test_it_goes_on_until_a_signal_and_shows_figures(draft: str, tmp_path: Path) -> None:
    file, figures = filed(tmp_path / "texts.jsonl", 75, 1), free_address()
    words = command(draft, tmp_path / "out", "--texts", file, "--every", "0.1", "--metrics", figures)
    folder = VersionFolder(tmp_path / "out")

    def version() -> int:
        current = folder.current()
        return -1 if current is None else current.version

    with subprocess.Popen([sys.executable, "-m", "deploy", *words], stderr=subprocess.PIPE, text=True) as learning:
        try:
            assert eventually(lambda: version() >= 1)
            first, seed = version(), 2
            while version() == first and seed < 20:  # of another kind, which come later
                filed(tmp_path / "texts.jsonl", 75, seed, ANOTHER)
                eventually(lambda: version() > first, 10.0)
                seed += 1
            with urllib.request.urlopen(f"http://{figures}/metrics", timeout=LIMIT_S) as page:
                told = page.read().decode()
            learning.send_signal(signal.SIGTERM)
            _, said = learning.communicate(timeout=LIMIT_S)
        finally:
            learning.kill()
    assert version() > first
    assert learning.returncode == 0
    assert "Traceback" not in said
    for name in (
        "learn_version",
        "learn_texts_total",
        "learn_steps_total",
        'learn_loss{service="learner",steps="last"}',
    ):
        assert f"specwire:{name}" in told


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--target", "t"], 2, "target: is for --heads: a drafter learns from tokens alone"),
        ([], 2, "redis-url: or --texts is needed: there is nothing to learn from"),
        (["--redis-url", "memory:", "--once"], 2, f"redis-url: {ONE_PROCESS}, not 'memory:'"),
        (["--redis-url", "file:/no/log", "--once"], 2, f"redis-url: {ONE_PROCESS}, not 'file:/no/log'"),
        (["--texts", "/no/such/file"], 2, "texts: there is no file /no/such/file"),
        (["--redis-url", "unix:///nowhere", "--margin", "0"], 2, "margin: must be above 0 and below 1, not 0"),
        (["--redis-url", "unix:///nowhere", "--rate", "nan"], 2, "rate: must be above 0 and below 1, not nan"),
        (["--redis-url", "unix:///nowhere", "--every", "0"], 2, "every: must be above 0 and at most a day, not 0 s"),
        (["--redis-url", "unix:///nowhere", "--steps", "0"], 2, "steps: must be at least 1, not 0"),
        (["--redis-url", "unix:///nowhere", "--threads", "0"], 2, "threads: must be at least 1, not 0"),
        (["--redis-url", "unix:///nowhere", "--metrics", "0.0.0.0:1"], 2, "metrics: "),
    ],
)
def test_what_is_wrong_is_one_line(
    more: list[str], code: int, message: str, draft: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(draft, tmp_path / "out", *more)) == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"specwire learn: error: {message}")


def test_a_head_needs_its_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["learn", "--heads", "head", "--out", str(tmp_path / "out"), "--learn-from", "*", "--texts", "x"]
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "specwire learn: error: target: is needed with --heads: it computes what a head reads"
    )
    with pytest.raises(SystemExit):
        main([*words, "--draft", "draft"])
    assert "argument --draft: not allowed with argument --heads" in capsys.readouterr().err


def test_whose_texts_must_be_said(draft: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["learn", "--draft", draft, "--out", str(tmp_path), "--texts", "x"])
    assert "the following arguments are required: --learn-from" in capsys.readouterr().err
