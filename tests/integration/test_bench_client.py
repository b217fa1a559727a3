"""`make bench-client`: a client is installed alone, from a package index, and calls a stack."""

from __future__ import annotations

import pytest

from bench import client


@pytest.mark.bench
@pytest.mark.timeout(600)
def test_a_client_alone_is_weighed_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert client.main(["--runs", "1"]) == 0
    told = capsys.readouterr().out
    assert all(part in told for part in ("grpcio", "protobuf", "specwire", client.PAIR))
    assert all(name in told for name in client.PROGRAMS)
