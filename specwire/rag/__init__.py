"""Speculative RAG (arXiv 2407.08223): drafts from subsets of documents, of which a target chooses one."""

from specwire.rag.drafts import (
    SELECTED,
    Draft,
    DraftWriter,
    RagAnswer,
    RagOptions,
    Scores,
    Template,
    answer,
)
from specwire.rag.retrieval import (
    Document,
    MissingExtra,
    Retrieved,
    Retriever,
    TfidfRetriever,
    passages,
    read_documents,
)

__all__ = [
    "SELECTED",
    "Document",
    "Draft",
    "DraftWriter",
    "MissingExtra",
    "RagAnswer",
    "RagOptions",
    "Retrieved",
    "Retriever",
    "Scores",
    "Template",
    "TfidfRetriever",
    "answer",
    "passages",
    "read_documents",
]
