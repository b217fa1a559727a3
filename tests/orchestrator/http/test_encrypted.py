"""HTTPS: the same certificates as gRPC's, asked of both sides where they are."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.certificates import Authority
from tests.orchestrator.http.front import COMPLETIONS, LIMIT_S, Front, another
from tests.orchestrator.stack import PROMPT, TARGET, plain


def test_both_sides_show_certificates(door: Front, tmp_path: Path) -> None:
    ours = Authority()
    trusting = ssl.create_default_context(cafile=ours.save(tmp_path, "authority"))
    certified = ssl.create_default_context(cafile=ours.save(tmp_path, "authority"))
    certified.load_cert_chain(*ours.sign().save(tmp_path, "client"))
    with another(door, tls=ours.server(client_ca=ours), verify=certified) as encrypted:
        assert encrypted.url.startswith("https://")
        answer = encrypted.done(COMPLETIONS, prompt=list(PROMPT), max_tokens=5, temperature=0, ignore_eos=True)
        assert answer["choices"][0]["text"] == " ".join(map(str, plain(TARGET, PROMPT, 5)))
        nobody = httpx.Client(base_url=encrypted.url, timeout=LIMIT_S, verify=trusting)
        with nobody, pytest.raises(httpx.TransportError):
            nobody.get("/health")
