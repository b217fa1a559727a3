"""Documents, which of them suit a question, and subsets of those that show it from several sides.

Section 3.2 of Speculative RAG (Wang et al., arXiv 2407.08223): the retrieved documents are clustered by what they say,
and each subset has one document of each cluster, so that it repeats little. The paper clusters embeddings; here the
vectors are TF-IDF's, and a `Retriever` of one's own may bring others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specwire.core.invalid import InvalidParameter
from specwire.corpus import named_texts

PASSAGE_CHARACTERS = 1000
# Words and numbers; a name_of_code is as many words as it is put together from.
WORDS = r"[^\W\d_]+|\d+"
# k-means begins so often anew, and takes the best.
BEGINNINGS = 10
SEEDS = 1 << 32
# Vectors that differ by less are those of equal texts.
DECIMALS = 9

Vectors = npt.NDArray[np.float64]


class MissingExtra(RuntimeError):
    """A package that is not installed everywhere is needed."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text that may hold an answer. name: for people, such as its file and lines."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Retrieved:
    """Documents for a question, the most similar first.

    similarities: one per document, from the largest on. vectors: (documents, dimensions), near where texts are alike.
    """

    documents: tuple[Document, ...]
    similarities: tuple[float, ...]
    vectors: Vectors


class Retriever(Protocol):
    """Finds documents. It is called in a thread of its own."""

    def retrieve(self, question: str, top: int) -> Retrieved:
        """At most `top` documents. Raises InvalidParameter where there is none for the question."""
        ...


def read_documents(paths: Sequence[Path], characters: int = PASSAGE_CHARACTERS) -> list[Document]:
    """Passages of files, and of the texts and source files in folders (`specwire.corpus`).

    Raises:
        InvalidParameter: names the path that is not there or cannot be read.
    """
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise InvalidParameter("documents", f"there is no {missing}")
    whole = (Document(name, text) for name, text in named_texts(paths, "documents"))
    return [passage for document in whole for passage in passages(document, characters)]


def passages(document: Document, characters: int = PASSAGE_CHARACTERS) -> list[Document]:
    """The document in pieces of whole lines, NAME:FIRST-LAST, of at most so many characters; longer lines are cut."""
    pieces: list[tuple[int, int, str]] = []
    for number, line in enumerate(document.text.splitlines(keepends=True), 1):
        for start in range(0, len(line), characters):
            part = line[start : start + characters]
            first, _, before = pieces[-1] if pieces else (number, number, "")
            if pieces and len(before) + len(part) <= characters:
                pieces[-1] = (first, number, before + part)
            else:
                pieces.append((number, number, part))
    if len(pieces) <= 1:
        return [document]
    return [Document(f"{document.name}:{first}-{last}", text) for first, last, text in pieces]


class TfidfRetriever:
    """Finds documents by the words that they share with a question: cosine of TF-IDF vectors.

    It needs the extra `rag` (scikit-learn). Documents without a text are left out.

    Raises:
        InvalidParameter: there is no word in any document.
        MissingExtra: scikit-learn is not installed.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = [document for document in documents if document.text.strip()]
        if not self._documents:
            raise InvalidParameter("documents", f"must hold a text; of {len(documents)} none does")
        self._vectorizer = _vectorizer()
        try:
            self._rows = self._vectorizer.fit_transform([document.text for document in self._documents])
        except ValueError:  # an empty vocabulary
            raise InvalidParameter("documents", f"must hold a word; of {len(documents)} none does") from None

    def retrieve(self, question: str, top: int) -> Retrieved:
        """As `Retriever`; documents that share no word with the question are left out."""
        asked = self._vectorizer.transform([question])
        similarities = (self._rows @ asked.T).toarray().ravel()  # all rows have length 1
        order = np.argsort(-similarities, kind="stable")[:top]
        best = [int(index) for index in order if similarities[index] > 0]
        if not best:
            raise InvalidParameter("question", f"shares no word with any of {len(self._documents)} documents")
        rows = self._rows[best]
        said = rows[:, np.unique(rows.indices)]
        return Retrieved(
            tuple(self._documents[index] for index in best),
            tuple(float(similarities[index]) for index in best),
            said.toarray(),
        )


def clustered(vectors: Vectors, count: int, seed: int) -> list[list[int]]:
    """Rows that are alike, by k-means: `count` clusters, or one for each different row where those are fewer.

    Indices rise within a cluster, and clusters by their first ones. Raises MissingExtra.
    """
    count = min(count, len(np.unique(vectors.round(DECIMALS), axis=0)))
    clusters: dict[int, list[int]] = {}
    for index, label in enumerate(_k_means(count, seed).fit_predict(vectors).tolist()):
        clusters.setdefault(label, []).append(index)
    return list(clusters.values())


def sampled_subsets(clusters: Sequence[Sequence[int]], count: int, seed: int) -> list[tuple[int, ...]]:
    """`count` different choices of one index from each cluster, or all there are; indices rise within each."""
    combinations = math.prod(map(len, clusters))
    numbers = random.Random(seed).sample(range(combinations), min(count, combinations))
    return [tuple(sorted(_choice(clusters, number))) for number in numbers]


def _choice(clusters: Sequence[Sequence[int]], number: int) -> Iterator[int]:
    """The choice of that number; its digits are places in the clusters."""
    for cluster in clusters:
        number, place = divmod(number, len(cluster))
        yield cluster[place]


def _vectorizer() -> Any:
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError as error:
        raise _missing(error) from error
    return TfidfVectorizer(token_pattern=WORDS, sublinear_tf=True)


def _k_means(count: int, seed: int) -> Any:
    try:
        from sklearn.cluster import KMeans
    except ImportError as error:
        raise _missing(error) from error
    return KMeans(count, n_init=BEGINNINGS, random_state=seed % SEEDS)


def _missing(error: ImportError) -> MissingExtra:
    return MissingExtra(f"scikit-learn is needed here (pip install 'specwire[rag]'): {error}")
