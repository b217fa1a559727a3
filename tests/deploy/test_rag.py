"""`specwire rag`: what it refuses before anything starts, the stack that it starts, and what it prints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

import demo_pair
from deploy.cli import main as cli
from deploy.cli.clients import rag
from specwire.rag import SELECTED, Document, Draft, RagAnswer, Retrieved, Scores

ELSEWHERE = ("--address", "127.0.0.1:1")
SHIPS = (Document("ships.md:1-2", "Ships pay."), Document("parser.py", "def parse(): ..."))
FOUND = RagAnswer(
    drafts=(
        Draft(SHIPS, " Said.", " none\n", Scores(-4.0, -3.0, -2.5)),
        Draft(SHIPS[:1], " Said.", " by length", Scores(-1.0, -2.0, -0.5), cut=7),
        Draft(SHIPS[1:], error="ABORTED: answer: small wrote none"),
    ),
    best=1,
    retrieved=Retrieved(SHIPS, (0.75, 0.25), np.eye(2)),
    model="large",
    draft_model="small",
    notes=("draft 2: 7 characters of its documents were left out",),
)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    (tmp_path / "ships.md").write_text("Ships pay\nby their length.\n")
    return tmp_path


def call(*words: str) -> rag.RagCall:
    parser = argparse.ArgumentParser()
    rag.add_arguments(parser)
    return rag.call_of(parser.parse_args(words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--top", "0"), "top: must be from 1 to 100, not 0"),
        (("--clusters", "0"), "clusters: must be from 1 to 100, not 0"),
        (("--subsets", "65"), "subsets: must be from 1 to 64, not 65"),
        (("--answer-tokens", "0"), f"answer_tokens: must be from 1 to {(1 << 32) - 1}, not 0"),
        (("--temperature", "nan"), "temperature: must be a finite number from 0 to 100, not nan"),
        (("--passage", "0"), "passage: must be at least 1, not 0"),
        (("--timeout", "0"), "timeout: must be a positive number of seconds, not 0.0"),
        (("--target", "m"), "address: names a running stack, --target and --draft one to start"),
    ],
)
def test_what_is_wrong_is_named(
    words: tuple[str, ...], message: str, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["rag", "Who pays?", "--documents", str(documents), *ELSEWHERE, *words]) == 2
    assert capsys.readouterr().err == f"specwire rag: error: {message}\n"


@pytest.mark.parametrize(
    ("question", "text", "message"),
    [
        (" ", "x", "question: must not be empty"),
        ("Who pays?", "", "documents: must hold a text; of 1 none does"),
        ("Who pays?", None, "documents: there is no "),
    ],
)
def test_questions_and_documents_are_looked_at_first(
    question: str, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.txt"
    if text is not None:
        file.write_text(text)
    assert cli.main(["rag", question, "--documents", str(file), *ELSEWHERE]) == 2
    assert capsys.readouterr().err.startswith(f"specwire rag: error: {message}")


def test_an_own_stack_serves_the_draft_model_beside_the_target(
    documents: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SPECWIRE_ADDRESS", raising=False)
    asked = ("Who pays?", "--documents", str(documents))
    own = call(*asked).where.own
    assert (own.target, own.draft, own.also) == (str(demo_pair.TARGET), None, (str(demo_pair.DRAFT),))
    assert call(*asked).model == "target"
    assert call(*asked, "--no-draft").where.own.also == ()
    assert call(*asked, "--draft-address", "h:1").where.own.also == ()
    same = call(*asked, "--target", "scripted:7", "--draft", "scripted:7")
    assert (same.where.own.also, same.model) == ((), "scripted:7")
    assert call(*asked, *ELSEWHERE).model == ""


def test_models_are_named_as_services_name_them(tmp_path: Path) -> None:
    assert rag.served_name(str(tmp_path)) == tmp_path.name
    assert rag.served_name("maker/model") == "maker/model"
    assert rag.served_name("files/model-q8.gguf") == "model-q8"


def test_the_table_marks_what_was_chosen() -> None:
    head, _, first, chosen, failed = rag.drafts_table(FOUND).splitlines()
    assert head.split() == ["documents", "log", "P", "draft", "self-consistency", "self-reflection"]
    assert first.split() == ["ships.md:1-2", "+", "parser.py", "-9.50", "-4.00", "-3.00", "-2.50"]
    assert chosen.split() == ["*", "ships.md:1-2", "-3.50", "-1.00", "-2.00", "-0.50"]
    assert failed.split()[:2] == ["parser.py:", "ABORTED:"]


def test_json_tells_everything_and_that_it_is_not_lossless() -> None:
    told = json.loads(json.dumps(rag.as_object(FOUND), allow_nan=False))
    assert (told["answer"], told["best"], told["lossy"], told["note"]) == ("by length", 1, True, SELECTED)
    assert (told["model"], told["draft_model"], told["notes"]) == ("large", "small", list(FOUND.notes))
    assert told["drafts"][1] == {
        "answer": " by length",
        "rationale": " Said.",
        "documents": ["ships.md:1-2"],
        "scores": {"draft": -1.0, "self_consistency": -2.0, "self_reflection": -0.5, "total": -3.5},
        "error": "",
        "cut": 7,
    }
    assert told["drafts"][2]["scores"] is None
    assert told["documents"][0] == {"name": "ships.md:1-2", "similarity": 0.75, "text": "Ships pay."}
