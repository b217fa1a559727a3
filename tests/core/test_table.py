"""Tables of n-grams against counting, the file they are kept in, and what a broken one says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.core.invalid import InvalidParameter
from specwire.core.verify.table import LEAST_PATH_SHARE, MOST_ORDER, SHARE_UNITS, NgramLevel, NgramTable, TableIndex
from specwire.text.table_file import MAGIC, load_table, save_table

TEXTS = st.lists(st.lists(st.integers(0, 4), max_size=40), max_size=4)


def counted(texts: Sequence[Sequence[int]], context: Sequence[int]) -> tuple[int, float] | None:
    """The most frequent token behind a context, of equals the lowest, and its share."""
    length = len(context)
    following = Counter(
        text[at + length]
        for text in texts
        for at in range(len(text) - length)
        if list(text[at : at + length]) == list(context)
    )
    if following.total() < (1 if length == 1 else 2):
        return None
    token, count = min(following.items(), key=lambda each: (-each[1], each[0]))
    return token, count / following.total()


def backed_off(texts: Sequence[Sequence[int]], tail: Sequence[int], order: int) -> tuple[int, int, float] | None:
    for length in range(min(order - 1, len(tail)), 0, -1):
        found = counted(texts, tail[len(tail) - length :])
        if found is not None:
            return length + 1, *found
    return None


@given(TEXTS, st.integers(2, MOST_ORDER), st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_it_says_what_counting_says(texts: list[list[int]], order: int, tail: list[int]) -> None:
    table = NgramTable.built(texts, order, "hash")
    expected, path, first = list(tail), 1.0, None
    while len(expected) < len(tail) + 4:
        found = backed_off(texts, expected, order)
        if found is None:
            break
        path *= round(SHARE_UNITS * found[2]) / SHARE_UNITS
        if first is not None and path < LEAST_PATH_SHARE:
            break
        first = first or found
        expected.append(found[1])
    tokens, known, share = table.following(tail, 4)
    assert list(tokens) == expected[len(tail) :]
    if first is None:
        assert (known, share) == (0, 0.0)
    else:
        assert known == first[0]
        assert share == pytest.approx(first[2], abs=0.5 / SHARE_UNITS)


def test_a_file_holds_it(tmp_path: Path) -> None:
    texts = [[1, 2, 3, 1, 2, 3, 4], [7, 1, 2, 5]]
    table, path = NgramTable.built(texts, 3, "hash"), tmp_path / "table"
    save_table(table, path)
    loaded = load_table(path)
    assert (loaded.tokenizer, loaded.order, loaded.contexts) == ("hash", 3, table.contexts)
    for tail in ([1], [2], [1, 2], [9], [3, 4]):
        assert loaded.following(tail, 5) == table.following(tail, 5)


def _told(header: str) -> bytes:
    return MAGIC + len(header).to_bytes(8, "little") + header.encode()


@pytest.mark.parametrize("at", ["begin", "header", "arrays", "end", "long", "endless", "deep"])
def test_a_broken_file_is_refused(tmp_path: Path, at: str) -> None:
    path = tmp_path / "table"
    save_table(NgramTable.built([[1, 2, 3] * 40], 3, "hash"), path)
    data = path.read_bytes()
    broken = {
        "begin": b"another" + data,
        "header": data[:20],
        "arrays": data.replace(b'"<u4"', b'"<f4"'),
        "end": data[:-64],
        "long": _told(f'{{"tokenizer": "hash", "arrays": [["<u8", {(1 << 64) - 1}]]}}') + bytes(4096),
        "endless": _told('{"tokenizer": "hash", "arrays": [["<u8", 1e999]]}') + bytes(4096),
        "deep": _told("[" * 60_000),
    }[at]
    path.write_bytes(broken)
    with pytest.raises(InvalidParameter, match=r"^table: .*table is "):
        load_table(path)


def test_a_file_whose_contexts_all_begin_alike_is_refused(tmp_path: Path) -> None:
    """A look, in the step of all sessions, would go through them one by one."""
    path = tmp_path / "table"
    for count, alike in ((256, True), (257, False)):
        keys = np.arange(count, dtype=np.uint64)
        zeros = np.zeros(count, np.uint32), np.zeros(count, np.uint8)
        save_table(NgramTable((NgramLevel(keys, *zeros, np.array([0, count, count], np.uint32)),), "hash"), path)
        if alike:
            assert load_table(path).contexts == count
            continue
        with pytest.raises(InvalidParameter, match="its arrays do not fit each other"):
            load_table(path)


@pytest.mark.parametrize("order", [1, 6])
def test_the_order_has_bounds(order: int) -> None:
    with pytest.raises(InvalidParameter, match=f"order: must be from 2 to 5, not {order}"):
        NgramTable.built([], order, "hash")


def test_ids_that_the_target_lacks_are_not_proposed() -> None:
    table = NgramTable.built([[1, 2, 300]], 2, "hash")
    found = TableIndex(table, [5, 1], 301).find(4)
    assert found is not None
    assert found.tokens == (2, 300)
    assert TableIndex(table, [5, 1], 300).find(4) is None
