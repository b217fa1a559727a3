"""What an edge box's commands say before they load anything."""

from __future__ import annotations

import pytest

from deploy.cli import main as cli


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("edge", "--draft", "scripted:7"), "edge: error: verifiers: at least one address is needed, or --registry"),
        (("edge", "--draft", "scripted:7", "--registry", "radish://a"), "edge: error: registry: "),
        (("edge", "--draft", "a.gguf", "--verifier", "127.0.0.1:1", "--kv-memory", "much"), "edge: error: kv-memory: "),
        (("edge", "--draft", "a.gguf", "--verifier", "127.0.0.1:1", "--context", "1"), "edge: error: context: "),
        (("draft", "scripted:7", "--connect", "127.0.0.1:1", "--connect", "nowhere"), "draft: error: connect: "),
    ],
)
def test_what_is_missing_is_named(words: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(list(words)) == 2
    said = capsys.readouterr().err
    assert (said.startswith(f"specwire {named}"), said.count("\n")) == (True, 1)
