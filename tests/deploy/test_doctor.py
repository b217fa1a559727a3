"""What the doctor finds, of real models, a real Redis and a real stack; and of machines that are not here."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import demo_pair
from deploy.cli import main as cli
from deploy.cli.diagnosis import checks
from deploy.cli.diagnosis.checks import Finding, Grade, bad, check_log, judge, lines, ok
from deploy.cli.diagnosis.doctor_models import check_models
from deploy.stack.redis_server import RedisServer
from orchestrator.store import open_store
from tests.faults.parts import parts
from tests.text import other_vocabularies

TARGET, DRAFT, OTHER = str(demo_pair.TARGET), str(demo_pair.DRAFT), "scripted:1"
GIB = 2**30


def texts(findings: list[Finding], grade: Grade) -> list[str]:
    return [f"{each.text} -> {each.remedy}" for each in findings if each.grade is grade]


def test_a_pair_that_fits() -> None:
    findings = list(check_models(TARGET, [DRAFT], "float32", 4, 8 * GIB))
    assert texts(findings, Grade.BAD) == []
    assert "have the same 4096 tokens" in findings[0].text


def test_a_pair_that_does_not_fit_together() -> None:
    (wrong,) = texts(list(check_models(TARGET, [OTHER], "float32", 4, 8 * GIB)), Grade.BAD)
    assert wrong.startswith(f"{OTHER} has ")
    assert "choose a draft model with the target's tokenizer" in wrong


@pytest.mark.parametrize(
    ("made", "least", "grade", "said"),
    [
        (other_vocabularies.sentencepiece, 0.5, Grade.OK, "tokens are shared (100% of a text); it drafts in these"),
        (other_vocabularies.sentencepiece, 1.1, Grade.WARN, "tokens are shared (100% of a text); it drafts in these"),
        (other_vocabularies.word_piece, 0.5, Grade.BAD, "this drafter's tokens do not stand for bytes"),
    ],
)
def test_a_pair_of_two_vocabularies(
    made: Callable[[], tuple[Tokenizer, list[int]]],
    least: float,
    grade: Grade,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deploy.cli.diagnosis.doctor_models.MUCH_SHARED", least)
    draft = other_vocabularies.save(tmp_path / "draft", made)
    findings = list(check_models(TARGET, [draft], "float32", 4, 8 * GIB))
    assert any(said in told for told in texts(findings, grade))
    assert (texts(findings, Grade.BAD) == []) is (grade is not Grade.BAD)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    (wrong,) = texts(list(check_models(str(tmp_path), [], "float32", 4, None)), Grade.BAD)
    assert wrong.startswith(f"{tmp_path} cannot be read: ")


def test_caches_that_are_too_large_get_fewer_slots() -> None:
    found = list(check_models(TARGET, [], "float32", 1024, GIB))
    assert texts(found, Grade.BAD) == []
    (told,) = texts(found, Grade.WARN)
    slots = int(told.rpartition("--slots ")[2].partition(",")[0])
    assert texts(list(check_models(TARGET, [], "float32", slots, GIB)), Grade.WARN) == []
    assert len(texts(list(check_models(TARGET, [], "float32", slots + 1, GIB)), Grade.WARN)) == 1


def test_it_runs_where_no_model_can() -> None:
    """An orchestrator's machine; with models named, that is what is wrong."""
    with parts() as owned:
        code, said, errors = owned.run("-m", "deploy", "doctor", "--target", OTHER, without="torch,transformers")
    assert (code, errors) == (1, "")
    assert "bad   lm        torch, transformers not installed: no model can be served on this machine" in said


@pytest.mark.parametrize(
    ("version", "grade"), [((3, 10), Grade.BAD), ((3, 11), Grade.OK), ((3, 12), Grade.OK), ((3, 99), Grade.WARN)]
)
def test_versions_of_python(version: tuple[int, int], grade: Grade) -> None:
    assert checks.check_python(version).grade is grade


def test_where_the_threads_of_one_process_are_and_a_quota_of_cores_are_told(tmp_path: Path) -> None:
    found = checks.check_placement()
    assert (found.grade, found.text.partition(", ")[0]) == (Grade.OK, "up --one-process has verifier")
    assert checks.check_cores(tmp_path).grade is Grade.OK
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert checks.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert checks.cpu_quota(tmp_path) == 0.5
    assert checks.check_cores(tmp_path).remedy == ("give --target-threads and --draft-threads 1 in all")


def test_memory_is_what_the_machine_and_its_group_leave(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert checks.available_memory(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal: 4096 kB\nMemAvailable: 2048 kB\n")
    assert checks.available_memory(meminfo, tmp_path) == 2048 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert checks.available_memory(meminfo, tmp_path) == 600000


def test_a_port_in_use_is_wrong_only_where_it_was_asked_for() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert checks.check_port(address, "listen", asked=False).grade is Grade.WARN
        found = checks.check_port(address, "listen", asked=True)
    assert (found.grade, found.remedy) == (Grade.BAD, "stop what listens there, or choose another --listen")


def test_settings_of_redis_that_lose_sessions() -> None:
    fine = {"redis_version": "7.2.11", "maxmemory_policy": "noeviction", "aof_enabled": 1}
    assert [each.grade for each in judge(fine, None)] == [Grade.OK]
    assert [each.grade for each in judge({**fine, "aof_enabled": 0}, True)] == [Grade.OK]
    poor = {"redis_version": "5.0.1", "maxmemory_policy": "allkeys-lru", "aof_enabled": 0}
    remedies = [each.remedy for each in judge(poor, False)]
    assert remedies == ["use 6.2 or newer", "CONFIG SET maxmemory-policy noeviction", "CONFIG SET appendonly yes"]


@pytest.mark.parametrize(
    ("version", "mended"),
    [("6.2.14", False), ("6.2.20", True), ("7.0.15", False), ("7.2.10", False), ("8.2.2", True), ("8.4.0", True)],
)
def test_a_redis_whose_scripts_can_break_out_is_told(version: str, mended: bool) -> None:
    info = {"redis_version": version, "maxmemory_policy": "noeviction", "aof_enabled": 1}
    _, *holes = judge(info, None)
    assert ["CVE-2025-49844" in each.text for each in holes] == ([] if mended else [True])
    assert all("put a redis-server on PATH" in each.remedy for each in holes)
    assert len(list(judge({**info, "valkey_version": "8.1.4"}, None))) == 1


async def test_a_real_redis() -> None:
    own, *holes = await check_log(None, "")
    assert own.text.startswith("private server ")
    assert len(holes) == ("private server 6.2.14" in own.text)
    with tempfile.TemporaryDirectory(prefix="specwire-") as folder:  # tmp_path may be too long for a socket
        server = RedisServer(Path(folder), lambda line: None)
        await server.start()
        try:
            found = await check_log(server.url, "")
            unfit = await check_log(server.url, "redis-fsync")
        finally:
            await server.stop()
    assert [each.grade for each in found] == [Grade.OK, Grade.OK, *(each.grade for each in holes), Grade.WARN]
    assert found[-1].remedy == "CONFIG SET appendonly yes"
    assert [each.grade for each in unfit] == [Grade.BAD]
    (gone,) = await check_log(server.url, "")
    assert (gone.grade, gone.topic) == (Grade.BAD, "redis")


async def test_a_log_in_a_file(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'log'}"
    assert await check_log(url, "") == [ok("log", f"it can be made in {tmp_path}")]
    store = await open_store(url)
    (had,) = await check_log(url, "")
    await store.close()
    assert (had.grade, had.text) == (Grade.BAD, f"redis-url: cannot use {url}: another process has it")
    assert await check_log(url, "file-fsync") == [ok("log", f"{url} can be used, durability file-fsync")]
    for wrong in (f"file:{tmp_path / 'none' / 'log'}", "file:"):
        (found,) = await check_log(wrong, "")
        assert found.grade is Grade.BAD


def test_a_line_each() -> None:
    shown = lines([ok("a", "fine"), bad("longer", "broken", "mend it")], colour=False)
    assert shown == "ok    a       fine\nbad   longer  broken -> mend it"


def test_the_command_says_whether_something_must_be_mended(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", "--target", OTHER, "--draft", OTHER]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert {"python", "lm", "pair", "redis", "port"} <= {each["topic"] for each in told["findings"]}
    assert cli.main(["doctor", "--target", OTHER, "--draft", "scripted:2", "--address", "127.0.0.1:1"]) == 1
    out = capsys.readouterr().out
    assert "cannot connect to 127.0.0.1:1 -> start it" in out
