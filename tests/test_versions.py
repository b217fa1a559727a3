"""The folder of a drafter that learns: what is in use is whole, whose it is, and which version saw which session."""

from __future__ import annotations

from pathlib import Path

import pytest

from specwire.versions import ANONYMOUS, DRAFT, HEAD, KEPT, Current, HistoryEntry, VersionError, VersionFolder

CALLERS = (ANONYMOUS,)


def add(folder: VersionFolder, number: int, since: int | None = None, sessions: tuple[str, ...] = ()) -> None:
    """A version that began from the one before it."""

    def write(path: Path) -> None:
        (path / "weights").write_text(str(number))

    before = max(0, number - 1)
    folder.add(write, HistoryEntry(number, before if since is None else since, before, sessions))


def use(folder: VersionFolder, number: int) -> None:
    folder.use(Current(number, "a/draft", CALLERS, "learnt", 0.5, 0.6))


@pytest.fixture
def folder(tmp_path: Path) -> VersionFolder:
    found = VersionFolder(tmp_path / "out")
    found.claim(CALLERS, "f" * 64)
    return found


def test_what_is_used_is_read_again(folder: VersionFolder) -> None:
    assert folder.current() is None
    assert folder.next_number() == 0
    add(folder, 0)
    use(folder, 0)
    again = VersionFolder(folder.path)
    assert again.current() == Current(0, "a/draft", CALLERS, "learnt", 0.5, 0.6)
    assert (again.version(0) / "weights").read_text() == "0"
    assert again.next_number() == 1


def test_a_learner_that_is_killed_while_it_writes_leaves_the_version_in_use(folder: VersionFolder) -> None:
    """Before the folder has its name, between the two renames, and in the middle of a line of the history."""
    add(folder, 0)
    use(folder, 0)

    def killed(path: Path) -> None:
        (path / "weights").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.add(killed, HistoryEntry(1, 0, 0, ()))
    add(folder, 2, since=0)
    with (folder.path / "history.jsonl").open("ab") as lines:
        lines.write(b'{"version": 3, "sin')
    (folder.path / "current.unfinished").write_bytes(b'{"vers')
    folder.release()
    again = VersionFolder(folder.path)
    again.claim(CALLERS, "f" * 64)
    current = again.current()
    assert current is not None
    assert current.version == 0
    assert not again.has(1)
    assert [entry.version for entry in again.history()] == [0, 2]
    assert again.next_number() == 3
    add(again, 3, since=0)
    use(again, 3)
    assert [entry.version for entry in again.history()] == [0, 2, 3]


def test_a_folder_is_for_those_for_whom_it_was_made(folder: VersionFolder) -> None:
    with pytest.raises(VersionError, match="another `specwire learn` writes there"):
        VersionFolder(folder.path).claim(CALLERS, "f" * 64)
    folder.release()
    for tenants, draft, message in (
        (("b", "a"), "f" * 64, r"out: tenants: is for \*, not for a, b: take another"),
        (CALLERS, "e" * 64, "out: draft: is for ffffffffffff, not for eeeeeeeeeeee: take another"),
    ):
        with pytest.raises(VersionError, match=message):
            VersionFolder(folder.path).claim(tenants, draft)
    with pytest.raises(VersionError, match="out: heads or target: is for ffffffffffff, not for e"):
        VersionFolder(folder.path).claim(CALLERS, "e" * 64, "heads or target")
    VersionFolder(folder.path).claim((*CALLERS, *CALLERS), "f" * 64)


def test_the_order_of_tenants_does_not_matter(tmp_path: Path) -> None:
    first = VersionFolder(tmp_path / "out")
    first.claim(("b", "a"), "f")
    first.release()
    VersionFolder(tmp_path / "out").claim(("a", "b", "a"), "f")


def test_what_cannot_be_read_is_named(folder: VersionFolder) -> None:
    (folder.path / "current").write_text('{"version": -1, "draft": "", "tenants": [], "why": ""}')
    with pytest.raises(VersionError, match="current: cannot be read: "):
        folder.current()
    (folder.path / "history.jsonl").write_text("no\n")
    with pytest.raises(VersionError, match=r"history\.jsonl: cannot be read: "):
        folder.history()


def test_a_session_is_forgotten_with_all_that_descends_from_it(folder: VersionFolder) -> None:
    for number, since, sessions in ((0, 0, ()), (1, 0, ("a",)), (2, 1, ("b",)), (3, 1, ("c",)), (4, 2, ("d",))):
        add(folder, number, since, sessions)
    use(folder, 4)
    assert folder.forget("unknown") == []
    assert folder.forget("b") == [2, 4]
    current = folder.current()
    assert current is not None
    assert (current.version, current.why, current.after) == (3, "forgot", None)
    assert [folder.has(number) for number in range(5)] == [True, True, False, True, False]
    assert folder.forget("a") == [1, 2, 3, 4]
    current = folder.current()
    assert current is not None
    assert current.version == 0
    assert folder.next_number() == 5


def test_a_folder_tells_what_it_has_versions_of(folder: VersionFolder) -> None:
    assert folder.begun
    assert not VersionFolder(folder.path / "versions").begun
    add(folder, 0)
    folder.use(Current(0, "some/head", CALLERS, "begun", kind=HEAD))
    assert folder.current() == folder.current(HEAD) == Current(0, "some/head", CALLERS, "begun", kind=HEAD)
    with pytest.raises(VersionError, match="out: has versions of a head, not of a draft"):
        folder.current(DRAFT)
    assert Current(7, "some/head", CALLERS, "learnt").name == "head@7"


def test_old_weights_go_and_the_history_stays(folder: VersionFolder) -> None:
    for number in range(10):
        add(folder, number)
    folder.prune([9, 3])
    there = [number for number in range(10) if folder.has(number)]
    assert there == [0, 3, *range(10 - KEPT, 10)]
    assert [entry.version for entry in folder.history()] == list(range(10))
