"""What sessions used: counted once through failover, told again after a failure, added up by tenant."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from deploy.cli import main as cli
from specwire.core.invalid import Code, InvalidParameter
from specwire.core.law.sampling import Sampling
from specwire.core.messages import FinishReason, Outcome, Verdict
from specwire.core.text import Stopping
from specwire.core.verify.session import Allowance
from specwire.rpc.server_options import ModelServiceOptions
from specwire.v1 import common_pb2, verify_pb2
from tests.verify_service.peer import connected, open_message, stub_of
from verify_service import usage
from verify_service.engine.messages import Admitted, Decided, Opening, Refusal, Report
from verify_service.server import start
from verify_service.usage import Usage, UsageLog, UsageRecord, append_records, check_usage, read_records, totals

LINK, HANDLE, PROMPT, POSITION_BYTES = 1, 7, (3, 1, 4, 1, 5), 100


def log_of(file: Path) -> UsageLog:
    return UsageLog(file, "a-model", POSITION_BYTES)


def opening(text: int = len(PROMPT), session: str = "s", tenant: str = "berlin", attach: int = 0) -> Opening:
    tokens, length = tuple(range(text)), len(PROMPT)
    return Opening(
        HANDLE, session, 1, attach, tokens, length, Sampling(), Stopping(99), Allowance(text, 99), tenant=tenant
    )


def decided(position: int, tokens: int, tested: int = 0, finish: FinishReason | None = None, attach: int = 0) -> Report:
    verdict = Verdict(position, (1,) * tokens, (Outcome.DIRECT,) * tokens, tested, finish)
    return Report(decided=[Decided(HANDLE, attach, verdict)])


def seated(position: int, cached: int = 0, attach: int = 0) -> Report:
    return Report(admitted=[Admitted(HANDLE, attach, position, cached=cached)])


def records(*files: Path) -> list[UsageRecord]:
    found = [record for file in files for record in read_records(file)]
    assert None not in found
    return [record for record in found if record is not None]


async def test_a_stay_is_told_from_its_slot_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "usage"
    log = log_of(file)
    log.opened(LINK, opening())
    await log.write()
    assert not file.exists()  # it has no slot yet
    log.reported(LINK, seated(5, cached=2))
    log.reported(LINK, decided(5, 3, tested=4))
    await log.write()
    log.reported(LINK, decided(8, 2, tested=1, finish=FinishReason.LENGTH))
    log.closed(LINK, [HANDLE])
    await log.stop()
    first, last = records(file)
    assert (first.stay, first.session, first.end, first.why) == (last.stay, last.session, 8, "running")
    assert (last.tenant, last.model, last.why) == ("berlin", "a-model", "length")
    assert (last.prompt_tokens, last.start, last.end, last.fed, last.tested) == (5, 5, 10, 3, 5)
    assert last.kv_byte_seconds >= 0
    assert 0 < last.began <= last.until
    assert last.session != "s"  # the id is the right to read the session
    assert totals([first, last])["berlin", "a-model"][:5] == (1, 5, 3, 5, 5)
    assert totals([last, first]) == totals([first, last])  # as where a part that was moved away is read last


async def test_memory_is_counted_by_time(tmp_path: Path) -> None:
    now = [0.0]
    log = UsageLog(tmp_path / "usage", "a-model", POSITION_BYTES, clock=lambda: now[0])
    log.opened(LINK, opening())
    log.reported(LINK, seated(5))
    now[0] = 2.0
    log.reported(LINK, decided(5, 5))
    now[0] = 20.0
    await log.write()
    log.reported(LINK, decided(10, 1))
    now[0] = 21.0
    log.link_lost(LINK)
    await log.stop()
    first, last = records(tmp_path / "usage")
    assert first.kv_byte_seconds == POSITION_BYTES * (5 * 2 + 10 * 5)  # of a pause the first 5 s
    assert (last.kv_byte_seconds, last.why) == (POSITION_BYTES * (5 * 2 + 10 * 5 + 11 * 1), "link lost")


async def test_what_moves_counts_once(tmp_path: Path) -> None:
    """The first verifier was killed behind its last line: the second one's text has no gap there."""
    first, second = log_of(tmp_path / "first"), log_of(tmp_path / "second")
    first.opened(LINK, opening())
    first.reported(LINK, seated(5))
    first.reported(LINK, decided(5, 10, tested=3))
    await first.write()
    second.opened(LINK, opening(text=18))
    second.reported(LINK, seated(18))
    # It decides positions again of which the first one's verdicts were lost: they are none of its own beyond them.
    second.reported(LINK, decided(18, 4, tested=2, finish=FinishReason.EOS))
    await second.stop()
    found = totals(records(tmp_path / "first", tmp_path / "second"))
    assert found["berlin", "a-model"][:5] == (1, 5, 5 + 18, 22 - 5, 5)


async def test_one_that_takes_its_text_for_a_prompt_saves_nothing() -> None:
    def stay(name: str, prompt: int, start: int, end: int) -> UsageRecord:
        return UsageRecord(name, "s", "", "m", prompt, start, end, 0, 0, 0.0, 0.0, 1.0, "closed")

    honest, other = stay("a", 5, 5, 20), stay("b", 20, 20, 30)
    assert totals([honest, other])["", "m"].decided == 25


async def test_what_is_not_of_this_stay_is_left_out(tmp_path: Path) -> None:
    log = log_of(tmp_path / "usage")
    log.opened(LINK, opening(attach=1))
    log.reported(LINK, seated(5))  # of an older connection
    log.reported(LINK, seated(5, attach=1))
    log.reported(LINK, decided(5, 3))
    log.reported(LINK, decided(5, 1, attach=1))
    log.reported(LINK + 1, Report(refused=[Refusal(HANDLE, Code.ABORTED, "another link's")]))
    log.reported(LINK, Report(refused=[Refusal(HANDLE, Code.ABORTED, "its own")]))
    log.opened(LINK, opening(session="never seated"))
    log.reported(LINK, Report(refused=[Refusal(HANDLE, Code.RESOURCE_EXHAUSTED, "no slot")]))
    await log.stop()
    (record,) = records(tmp_path / "usage")
    assert (record.end, record.why) == (6, "refused")


async def test_a_session_that_is_opened_anew_has_another_stay(tmp_path: Path) -> None:
    """As under rules that weigh draft tokens, where another drafter takes over: the same handle, a newer attach."""
    log = log_of(tmp_path / "usage")
    log.opened(LINK, opening())
    log.reported(LINK, seated(5))
    log.reported(LINK, decided(5, 3, tested=4))
    log.opened(LINK, opening(text=8, attach=1))
    log.reported(LINK, seated(8, cached=8, attach=1))
    log.reported(LINK, decided(8, 2, tested=1, attach=1))
    log.closed(LINK, [HANDLE])
    await log.stop()
    first, second = records(tmp_path / "usage")
    assert (first.why, first.end, second.start, second.end) == ("opened anew", 8, 8, 10)
    assert totals([first, second])["berlin", "a-model"][:5] == (1, 5, 5, 5, 5)


async def test_a_file_that_fails_is_told_of_once_and_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "MOST_WAITING", 2)
    folder = tmp_path / "gone"
    log = log_of(folder / "usage")
    with caplog.at_level(logging.ERROR):
        for session in ("a", "b", "c"):
            log.opened(LINK, opening(session=session))
            log.reported(LINK, seated(5))
            log.closed(LINK, [HANDLE])
            await log.write()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "--usage-log" in caplog.text
    assert log.lost == 1
    folder.mkdir()
    await log.write()
    assert len(records(folder / "usage")) == 2
    await log.write()
    assert len(records(folder / "usage")) == 2


def to_score(
    score_id: str, tokens: Sequence[int] = PROMPT, others: Sequence[Sequence[int]] = ()
) -> verify_pb2.ScoreRequest:
    more = [verify_pb2.Continuation(tokens=each) for each in others]
    return verify_pb2.ScoreRequest(tokens=tokens, from_position=2, score_id=score_id, others=more)


async def test_a_score_that_is_asked_again_counts_once(tmp_path: Path) -> None:
    """On this verifier or another one; its record is there before its answer."""
    first, second = log_of(tmp_path / "first"), log_of(tmp_path / "second")
    asked = to_score("one", others=[(7, 8)])
    await first.scored(asked, "berlin", 5, 0.5)
    (record,) = records(tmp_path / "first")
    assert (record.tenant, record.model, record.why, record.scored) == ("berlin", "a-model", "scored", 5)
    await first.scored(asked, "berlin", 5, 0.25)
    await second.scored(asked, "berlin", 5, 0.25)
    found = totals(records(tmp_path / "first", tmp_path / "second"))
    memory = POSITION_BYTES * len(PROMPT) * 0.5
    assert found == {("berlin", "a-model"): Usage(1, len(PROMPT) + 2, len(PROMPT) + 1, 0, 0, 5, memory)}


async def test_what_is_another_score_counts_by_itself(tmp_path: Path) -> None:
    """Whatever id it comes with: a caller who gives all of them one saves nothing, and no neighbour is told for it."""
    log = log_of(tmp_path / "usage")
    for asked, tenant in (
        (to_score("one"), "berlin"),
        (to_score("one", tokens=(3, 1, 4, 1, 6)), "berlin"),
        (to_score("two"), "berlin"),
        (to_score("one"), "oslo"),
        (to_score(""), "oslo"),
        (to_score(""), "oslo"),
    ):
        await log.scored(asked, tenant, 3, 0.1)
    found = totals(records(tmp_path / "usage"))
    assert {tenant: (usage.sessions, usage.scored) for (tenant, _), usage in found.items()} == {
        "berlin": (3, 9),
        "oslo": (3, 9),
    }


async def test_a_score_is_answered_although_its_record_cannot_be_written_yet(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    log = log_of(folder / "usage")
    log.opened(LINK, opening())
    log.reported(LINK, seated(5))
    await log.scored(to_score("one"), "berlin", 3, 0.1)
    folder.mkdir()
    await log.scored(to_score("two"), "berlin", 3, 0.1)
    assert [record.why for record in records(folder / "usage")] == ["scored"] * 2  # what runs is told by the clock
    await log.stop()
    assert totals(records(folder / "usage"))["berlin", "a-model"][:2] == (3, 3 * len(PROMPT))


@pytest.mark.parametrize("cut", range(1, 20))
async def test_a_part_of_a_line_spoils_no_other(tmp_path: Path, cut: int) -> None:
    """As a full disk or a killed process leaves it."""
    file, log = tmp_path / "usage", log_of(tmp_path / "usage")
    for session in ("a", "b"):
        log.opened(LINK, opening(session=session))
        log.reported(LINK, seated(5))
        log.closed(LINK, [HANDLE])
        await log.write()
        if session == "a":
            file.write_bytes(file.read_bytes()[:-cut])
    assert [record is None for record in read_records(file)] == ([False, False] if cut == 1 else [True, False])


def test_a_place_that_takes_no_lines_is_refused(tmp_path: Path) -> None:
    check_usage(None)
    check_usage(tmp_path / "new")
    with pytest.raises(InvalidParameter, match=r"usage-log: .*cannot be written: Is a directory"):
        check_usage(tmp_path)


async def test_a_verifier_writes_what_its_sessions_used(tmp_path: Path) -> None:
    file = tmp_path / "usage"
    running = await start(ModelServiceOptions("scripted:7:delay_ms=5", slots=2, context=512), usage_log=file)
    try:
        async with connected(running) as peer:
            await peer.open(1, PROMPT)
            await peer.open(2, PROMPT)
            await peer.until_finished(1, 2)
            await peer.send(opens=[open_message(3, PROMPT, peer.info, stopping=common_pb2.Stopping(max_tokens=400))])
            while len(peer.tokens.get(3, ())) < 2:
                await peer.receive()
    finally:
        await running.stop()
    found = totals(records(file))["", running.info.model]
    assert (found.sessions, found.prompt_tokens) == (3, 3 * len(PROMPT))
    assert found.decided >= 40 + 40 + 2
    assert {record.why for record in records(file)} >= {"length", "link lost"}


async def test_a_verifier_writes_what_it_scored(tmp_path: Path) -> None:
    """What is refused, or is invalid, is in no record."""
    file = tmp_path / "usage"
    running = await start(ModelServiceOptions("scripted:7", slots=1, context=512), usage_log=file)
    try:
        async with connected(running) as peer, stub_of(running) as stub:
            for _ in range(2):
                await stub.Score(to_score("one"))
                (record, *_) = records(file)
                assert (record.scored, record.tenant, record.model) == (3, "", running.info.model)
            await peer.open(1, PROMPT, progress=verify_pb2.Progress(credit=6))
            await peer.receive()
            for refused in (to_score("no slot"), to_score("x" * 257), to_score("", tokens=PROMPT[:2])):
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.Score(refused)
    finally:
        await running.stop()
    scored = [record for record in records(file) if record.why == "scored"]
    assert totals(scored)["", running.info.model][:2] == (1, len(PROMPT))


def test_the_command_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "usage"
    of = {"prompt_tokens": 5, "start": 5, "fed": 5, "tested": 2, "kv_byte_seconds": 1.5, "began": 0.0, "until": 1.0}
    append_records(
        file,
        [
            UsageRecord(stay=stay, session=stay, tenant=tenant, model="m", end=end, why="closed", **of)  # type: ignore[arg-type]
            for stay, tenant, end in (("a", "berlin", 1005), ("b", "berlin", 15), ("c", "", 6))
        ],
    )
    with file.open("a") as lines:
        lines.write('{"stay": "half\n\n')
    assert cli.main(["usage", str(file)]) == 0
    shown = capsys.readouterr()
    assert shown.err == "specwire usage: 1 lines are no records, and are left out\n"
    assert [line.split() for line in shown.out.splitlines()[2:]] == [
        ["-", "m", "1", "5", "5", "1", "2", "0", "0.000"],
        ["berlin", "m", "2", "10", "10", "1,010", "4", "0", "0.000"],
    ]
    assert cli.main(["usage", "--json", str(file)]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told[1] == {"tenant": "berlin", "model": "m", **Usage(2, 10, 10, 1010, 4, 0, 3.0)._asdict()}
    assert cli.main(["usage", str(tmp_path / "nowhere")]) == 1
    assert "nowhere: No such file" in capsys.readouterr().err
