"""Files of tokens, what is wrong with them, and who is known by which token."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from specwire.core.invalid import InvalidParameter
from specwire.rpc.errors import StatusError
from specwire.rpc.keys import Keys, read_keys, read_token, show
from tests.options import parsed, private

ONE, TWO = "one-token-of-length", "two-token-of-length"


def test_each_token_is_its_holders(tmp_path: Path) -> None:
    file = private(tmp_path / "keys", f"# who may call\n\nada {ONE}\n  bob\t{TWO}\nada ada-has-a-second-one\n", 0o640)
    keys = read_keys("--api-keys", file)
    assert keys is not None
    assert keys.names == {"ada", "bob"}
    assert [keys.holder(show(token)) for token in (ONE, TWO, "ada-has-a-second-one")] == ["ada", "bob", "ada"]
    assert read_keys("--api-keys", None) is None


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ONE),),
        (("authorization", f"bearer {ONE}"),),
        (("authorization", "Bearer "),),
        (("authorization", f"Bearer {ONE}x"),),
        (("authorization", f"Bearer {ONE[:-1]}"),),
        (("authorization", b"Bearer " + ONE.encode()),),
        (("x-authorization", f"Bearer {ONE}"),),
    ],
)
def test_who_shows_none_or_another_is_not_let_in(metadata: tuple[tuple[str, str | bytes], ...]) -> None:
    with pytest.raises(StatusError) as refused:
        Keys({ONE: "ada", TWO: "bob"}).holder(metadata)
    assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert ONE not in refused.value.message


def test_no_token_is_kept_or_shown() -> None:
    keys = Keys({ONE: "ada"})
    assert ONE not in repr(vars(keys))


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("", 0o600, "FILE holds no key"),
        ("# none\n", 0o600, "FILE holds no key"),
        (f"ada {ONE}\n", 0o644, "FILE is open to others (mode 0644): chmod 600 FILE"),
        (f"ada {ONE}\n", 0o620, "FILE is open to others (mode 0620): chmod 600 FILE"),
        (f"{ONE}\n", 0o600, "FILE, line 1: must be NAME TOKEN"),
        (f"ada {ONE} more\n", 0o600, "FILE, line 1: must be NAME TOKEN"),
        (f"a/b {ONE}\n", 0o600, "FILE, line 1: must be NAME TOKEN"),
        ("\nada secret\n", 0o600, "FILE, line 2: a token has 16 to 512 of the characters"),
        (f"ada {ONE}\nbob {ONE}\n", 0o600, "FILE, line 2: the same token stands in another line"),
        (b"\xff\xfe", 0o600, "FILE is not UTF-8 at byte 0"),
    ],
)
def test_a_file_that_is_no_good_is_named(content: str | bytes, mode: int, message: str, tmp_path: Path) -> None:
    file = private(tmp_path / "keys", content, mode)
    with pytest.raises(InvalidParameter) as refused:
        read_keys("--api-keys", file)
    said = str(refused.value)
    assert said.replace(file, "FILE").startswith(f"--api-keys: {message}")
    assert ONE not in said
    assert "secret" not in said


def test_a_client_has_its_token_from_a_file_or_its_environment(tmp_path: Path) -> None:
    file = private(tmp_path / "token", ONE + "\n")
    assert read_token(parsed("client", "--token-file", file), {"SPECWIRE_TOKEN": TWO}) == ONE
    assert read_token(parsed("client"), {"SPECWIRE_TOKEN": TWO}) == TWO
    assert read_token(parsed("client"), {"SPECWIRE_TOKEN": ""}) == ""
    assert read_token(parsed("client")) == ""
    assert show("") == ()


def test_what_is_no_token_is_refused_unseen(tmp_path: Path) -> None:
    file = private(tmp_path / "token", "two words")
    for args, environment in (
        (parsed("client", "--token-file", file), {}),
        (parsed("client"), {"SPECWIRE_TOKEN": "two words"}),
    ):
        with pytest.raises(InvalidParameter, match="a token has 16 to 512") as refused:
            read_token(args, environment)
        assert "two words" not in str(refused.value)
    with pytest.raises(InvalidParameter, match="--token-file: .*none cannot be read: No such file or directory"):
        read_token(parsed("client", "--token-file", str(tmp_path / "none")))
