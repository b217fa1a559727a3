"""What `make setup-llamacpp` says of its build: a forward that a signal ends is told, with a way out."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from scripts import llamacpp_check


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", ""),
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV, mostly a library computed what"),
        ("import os; os.kill(os.getpid(), 4)", "ended by SIGILL, an instruction that the processor lacks"),
        ("raise SystemExit('no such file')", "no such file"),
    ],
)
def test_the_end_of_a_forward_is_told(source: str, reason: str) -> None:
    assert llamacpp_check.failure([sys.executable, "-c", source]).startswith(reason)
    assert bool(llamacpp_check.failure([sys.executable, "-c", source])) == bool(reason)


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="llama_cpp is not there: make setup-llamacpp")
def test_this_build_computes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert llamacpp_check.main() == 0
    monkeypatch.setattr(llamacpp_check, "LOAD", "import os; os.abort()")
    assert llamacpp_check.main() == 1
    said = capsys.readouterr()
    assert said.out == "setup-llamacpp: models in 4 and 8 bits are computed\n"
    assert "setup-llamacpp: a model in Q4_0: ended by SIGABRT, mostly" in said.err
    assert "GGML_NATIVE=OFF" in said.err
