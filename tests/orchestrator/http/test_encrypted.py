"""HTTPS: the same certificates as gRPC's, asked of both sides where they are."""

from __future__ import annotations

import argparse
import ssl
from pathlib import Path

import httpx2 as httpx
import pytest

from bench.harness.certificates import Authority
from specwire.options import add_options
from specwire.rpc import renewal
from specwire.rpc.tls import server_tls
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


def test_connections_of_an_authority_that_is_removed_are_cut(
    door: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "LOOK_EVERY_S", 0.05)
    ours, left, gone = Authority("ours"), Authority("left"), Authority("gone")

    def certified(by: Authority) -> ssl.SSLContext:
        context = ssl.create_default_context(cadata=ours.pem.decode())
        context.load_cert_chain(*by.sign().save(tmp_path, "client"))
        return context

    def trust(*authorities: Authority) -> str:
        fresh = tmp_path / "trusted.new"
        fresh.write_bytes(b"".join(each.pem for each in authorities))
        return str(fresh.replace(tmp_path / "trusted.pem"))

    parser = argparse.ArgumentParser()
    add_options(parser, "orchestrate")
    cert, key = ours.sign().save(tmp_path, "server")
    flags = ["--tls-cert", cert, "--tls-key", key, "--tls-client-ca", trust(left, gone)]
    body = {"prompt": list(PROMPT), "ignore_eos": True, "stream": True}
    with another(door, tls=server_tls(parser.parse_args(flags)), verify=certified(left)) as known:
        bob = httpx.Client(base_url=known.url, timeout=LIMIT_S, verify=certified(gone))
        assert known.client.get("/health").status_code == 200
        with bob, bob.stream("POST", COMPLETIONS, json=body) as his:
            lines = his.iter_lines()
            assert next(lines)
            trust(left)
            with pytest.raises(httpx.TransportError):
                for _ in lines:
                    pass
            with pytest.raises(httpx.TransportError):
                bob.get("/health")
        assert known.client.get("/health").status_code == 200
