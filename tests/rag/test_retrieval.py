"""Documents for a question: passages, TF-IDF, clusters, and subsets with one document of each."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specwire.core.invalid import InvalidParameter
from specwire.rag import Document, MissingExtra, TfidfRetriever, passages, read_documents
from specwire.rag.retrieval import clustered, sampled_subsets

DOCUMENTS = [
    Document("ships", "The harbour master counts ships. Ships pay by their length."),
    Document("empty", " \n"),
    Document("parser", "def parse_header(line): return line.partition(':')"),
    Document("more ships", "A ship's length is measured at the harbour."),
    Document("weather", "Rain is expected on Tuesday."),
]


def test_what_shares_words_is_found_the_most_similar_first() -> None:
    retriever = TfidfRetriever(DOCUMENTS)
    found = retriever.retrieve("Which ships does the harbour master count?", top=3)
    assert [document.name for document in found.documents] == ["ships", "more ships"]
    assert found.similarities[0] > found.similarities[1] > 0
    assert found.vectors.shape[0] == 2
    assert np.linalg.norm(found.vectors, axis=1) == pytest.approx(1.0)
    [best] = retriever.retrieve("Which ships does the harbour master count?", top=1).documents
    assert best.name == "ships"


def test_a_name_of_code_is_found_by_its_words() -> None:
    [found] = TfidfRetriever(DOCUMENTS).retrieve("Where do I parse a header?", top=1).documents
    assert found.name == "parser"


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "documents: must hold a text; of 0 none does"),
        ([Document("a", ""), Document("b", "\n")], "documents: must hold a text; of 2 none does"),
        ([Document("a", "?! --")], "documents: must hold a word; of 1 none does"),
    ],
)
def test_documents_without_a_word_are_refused(documents: list[Document], message: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        TfidfRetriever(documents)
    assert str(raised.value) == message


def test_a_question_about_something_else_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="^question: shares no word with any of 4 documents$"):
        TfidfRetriever(DOCUMENTS).retrieve("Quo vadis?", top=3)


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    with pytest.raises(MissingExtra, match=r"pip install 'specwire\[rag\]'"):
        TfidfRetriever(DOCUMENTS)
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(MissingExtra, match=r"pip install 'specwire\[rag\]'"):
        clustered(np.eye(2), 2, seed=0)


def test_rows_that_are_alike_are_one_cluster() -> None:
    rows = np.array([[1.0, 0.0], [0.0, 1.0], [0.99, 0.05], [0.02, 0.98], [1.0, 0.0]])
    for seed in (0, -1, 1 << 63):
        assert clustered(rows, 2, seed) == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize(("rows", "count"), [([[1.0, 0.0]] * 3, 1), ([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], 2)])
def test_there_are_no_more_clusters_than_different_rows(rows: list[list[float]], count: int) -> None:
    found = clustered(np.array(rows), 5, seed=1)
    assert len(found) == count
    assert sorted(itertools.chain.from_iterable(found)) == [0, 1, 2]


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), count=st.integers(1, 12), seed=st.integers(0, 99))
def test_each_subset_has_one_of_each_cluster_and_none_is_there_twice(sizes: list[int], count: int, seed: int) -> None:
    ends = list(itertools.accumulate(sizes))
    clusters = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    found = sampled_subsets(clusters, count, seed)
    assert len(found) == len(set(found)) == min(count, int(np.prod(sizes)))
    for subset in found:
        assert [len(set(subset) & set(cluster)) for cluster in clusters] == [1] * len(clusters)
        assert list(subset) == sorted(subset)
    assert found == sampled_subsets(clusters, count, seed)


def test_another_seed_samples_others() -> None:
    clusters = [list(range(10)), list(range(10, 20))]
    assert len({tuple(sampled_subsets(clusters, 5, seed)) for seed in range(8)}) > 1


@given(text=st.text(alphabet="ab\n", max_size=60), characters=st.integers(1, 20))
def test_passages_are_the_whole_text_in_pieces(text: str, characters: int) -> None:
    found = passages(Document("d", text), characters)
    assert "".join(each.text for each in found) == text
    assert all(len(each.text) <= characters for each in found)


def test_passages_end_with_lines_and_say_which() -> None:
    found = passages(Document("d", "one\ntwo\nthree\nfourfourfour\n"), 9)
    assert [(each.name, each.text) for each in found] == [
        ("d:1-2", "one\ntwo\n"),
        ("d:3-3", "three\n"),
        ("d:4-4", "fourfourf"),
        ("d:4-4", "our\n"),
    ]


def test_files_and_folders_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("first\nsecond\n")
    (tmp_path / "b.jsonl").write_text('{"text": "third"}\n')
    (tmp_path / "c.bin").write_bytes(b"\xff")
    found = read_documents([tmp_path], characters=8)
    assert [(each.name, each.text) for each in found] == [
        (f"{tmp_path}/a.md:1-1", "first\n"),
        (f"{tmp_path}/a.md:2-2", "second\n"),
        (f"{tmp_path}/b.jsonl:1", "third"),
    ]
    with pytest.raises(InvalidParameter, match=f"^documents: there is no {tmp_path}/none$"):
        read_documents([tmp_path / "a.md", tmp_path / "none"])
    with pytest.raises(InvalidParameter, match="^documents: .*c.bin: cannot be read: UnicodeDecodeError"):
        read_documents([tmp_path / "c.bin"])
