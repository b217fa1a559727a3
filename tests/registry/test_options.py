"""How a service is told to register, and what it is told when that makes no sense."""

from __future__ import annotations

import argparse

import pytest

import draft_service.server
import verify_service.server
from specwire.core.invalid import InvalidParameter
from specwire.registry.options import NOWHERE, RegistryOptions, advertised

URL = "redis://127.0.0.1:6379"


@pytest.mark.parametrize(
    ("advertise", "listening", "told"),
    [
        ("", "127.0.0.1:50061", "127.0.0.1:50061"),
        ("gpu-1", "127.0.0.1:50061", "gpu-1:50061"),
        ("gpu-1:7", "127.0.0.1:50061", "gpu-1:7"),
        ("[fd00::1]", "[::1]:50061", "[fd00::1]:50061"),
        ("[fd00::1]:7", "[::1]:50061", "[fd00::1]:7"),
    ],
)
def test_where_others_dial(advertise: str, listening: str, told: str) -> None:
    assert advertised(advertise, listening) == told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://x"}, "registry: 'http://x' begins with none of redis, "),
        ({"url": "redis://:secret@x:y"}, "registry: port: must be from 1 to 65535: redis://:***@x:y"),
        ({"url": "memory:"}, "registry: 'memory:' begins with none of redis, "),
        ({"url": URL, "region": "a b"}, "region: must be at most 64 of A-Z a-z 0-9 . _ -, not 'a b'"),
        ({"url": URL, "advertise": "a b"}, "advertise: 'a b:1' is not HOST:PORT"),
        ({"url": URL, "advertise": "a:0"}, "advertise: 'a:0' is not HOST:PORT"),
        ({"advertise": "a"}, "advertise: needs --registry"),
    ],
)
def test_what_makes_no_sense(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        RegistryOptions(**options)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1"])
def test_an_address_of_all_interfaces_is_none_for_others(listen: str) -> None:
    with pytest.raises(InvalidParameter, match=r"advertise: is needed: .* does not say where others dial"):
        RegistryOptions(URL).check_listen(listen)
    RegistryOptions(URL, "gpu-1").check_listen(listen)
    NOWHERE.check_listen(listen)


@pytest.mark.parametrize(
    ("service", "words", "message"),
    [
        (verify_service.server, ["--registry", "x"], "specwire verify: error: registry: 'x' begins with none of"),
        (draft_service.server, ["--advertise", "x"], "specwire draft: error: advertise: needs --registry"),
        (
            draft_service.server,
            ["--connect", "a:1", "--registry", URL],
            "specwire draft: error: connect: a drafter that dials in does not listen: leave out --listen",
        ),
        (
            verify_service.server,
            ["--registry", URL, "--listen", "0.0.0.0:1", "--insecure"],
            "specwire verify: error: advertise: is needed: 0.0.0.0:1 does not say",
        ),
    ],
)
def test_a_command_says_so(service: object, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    service.add_arguments(parser)  # type: ignore[attr-defined]  # a module
    assert service.run(parser.parse_args(["scripted:7", *words])) == 2  # type: ignore[attr-defined]  # a module
    assert capsys.readouterr().err.startswith(message)
