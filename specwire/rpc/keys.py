"""Bearer tokens: whom a server lets in, and what a client shows.

    server    --api-keys FILE      a line for each key: NAME TOKEN; blank lines and those that begin with # are skipped
    client    --token-file FILE    the token alone

A name may have several keys, so that one can be replaced while the other is still in use. Files that hold tokens must
not be open to others than their owner and its group. A file that changes is read again (`specwire.rpc.renewal`). On the
wire it is metadata, `authorization: Bearer TOKEN`.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import grpc

from specwire.core.invalid import InvalidParameter
from specwire.rpc.errors import StatusError
from specwire.rpc.renewal import Origin

TOKEN_VARIABLE = "SPECWIRE_TOKEN"
HEADER = "authorization"
SCHEME = "Bearer "
# Characters that an HTTP header may carry; 16 random ones are the least that cannot be guessed.
TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
TOO_OPEN = stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO

Metadata = Iterable[tuple[str, str | bytes]]


class Keys:
    """The tokens that may call, as hashes.

    Args: holders: the holder's name by token.

    `origin`: the file that they were read of; None where they stay as they are.
    """

    def __init__(self, holders: Mapping[str, str]) -> None:
        self._holders = tuple((_digest(token), name) for token, name in holders.items())
        self.origin: Origin[Keys] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and self._holders == other._holders

    def __hash__(self) -> int:
        return hash(self._holders)

    @property
    def names(self) -> frozenset[str]:
        """Of everybody who may call now."""
        return frozenset(name for _, name in self._current)

    @property
    def _current(self) -> tuple[tuple[bytes, str], ...]:
        return (self if self.origin is None else self.origin.latest)._holders

    def holder(self, metadata: Metadata) -> str:
        """The name of the holder of the token in a call's metadata.

        Every key is compared, each in constant time, so the time tells nothing about any of them.

        Raises:
            StatusError: UNAUTHENTICATED.
        """
        shown, found = _digest(_shown(metadata)), None
        for digest, name in self._current:
            if hmac.compare_digest(digest, shown):
                found = name
        if found is None:
            raise StatusError(grpc.StatusCode.UNAUTHENTICATED, f"{HEADER}: this token is not known here")
        return found


@dataclass(frozen=True, slots=True)
class Token:
    """What a client shows: `current` is what stands in its file by now. Nothing where `text` is ""."""

    text: str = field(default="", repr=False)
    origin: Origin[Token] | None = field(default=None, repr=False, compare=False)

    @property
    def current(self) -> str:
        return self.text if self.origin is None else self.origin.latest.text

    def __bool__(self) -> bool:
        return bool(self.text)


def text_of(token: Token | str) -> str:
    """What to show now."""
    return token.current if isinstance(token, Token) else token


def _digest(token: str) -> bytes:
    """A digest has one length, so comparing tells nothing about the token's length either."""
    return hashlib.sha256(token.encode()).digest()


def _shown(metadata: Metadata) -> str:
    value = next((value for key, value in metadata if key == HEADER), None)
    if not isinstance(value, str) or not value.startswith(SCHEME):
        raise StatusError(grpc.StatusCode.UNAUTHENTICATED, f"{HEADER}: a token is needed, as 'Bearer TOKEN'")
    return value.removeprefix(SCHEME)


def show(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call that shows `token`; none for ""."""
    return ((HEADER, SCHEME + token),) if token else ()


def read_keys(flag: str, file: str | None) -> Keys | None:
    """The keys in a file; None without one. InvalidParameter names flag, file and line, and shows no token."""
    if file is None:
        return None
    origin = Origin([file], partial(_keys_in, flag, file))
    keys = origin.latest
    keys.origin = origin
    return keys


def _keys_in(flag: str, file: str) -> Keys:
    holders: dict[str, str] = {}
    for number, line in enumerate(_private_text(flag, file).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not NAME.fullmatch(words[0]):
            raise InvalidParameter(flag, f"{file}, line {number}: must be NAME TOKEN, the name of {NAME.pattern}")
        name, token = words
        _check_token(flag, f"{file}, line {number}", token)
        if token in holders:
            raise InvalidParameter(flag, f"{file}, line {number}: the same token stands in another line")
        holders[token] = name
    if not holders:
        raise InvalidParameter(flag, f"{file} holds no key")
    return Keys(holders)


def read_token(args: argparse.Namespace, environment: Mapping[str, str] | None = None) -> str:
    """The token in --token-file, else in the environment where it is given, else ""; InvalidParameter if it is none."""
    if args.token_file is not None:
        return read_secret("--token-file", args.token_file)
    token = (environment or {}).get(TOKEN_VARIABLE, "")
    if token:
        _check_token(TOKEN_VARIABLE, "its value", token)
    return token


def read_peer_token(args: argparse.Namespace) -> Token:
    """Like `read_token`, for links that outlive their tokens: of --token-file, and read again when that changes."""
    file = args.token_file
    if file is None:
        return Token()
    origin = Origin([file], lambda: Token(read_secret("--token-file", file)))
    return replace(origin.latest, origin=origin)


def read_secret(flag: str, file: str | None) -> str:
    """The token that is all of a file; "" without one. InvalidParameter if it is none."""
    if file is None:
        return ""
    token = _private_text(flag, file).strip()
    _check_token(flag, file, token)
    return token


def _check_token(flag: str, place: str, token: str) -> None:
    if not TOKEN.fullmatch(token):
        raise InvalidParameter(flag, f"{place}: a token has 16 to 512 of the characters A-Z a-z 0-9 . _ ~ + / = -")


def _private_text(flag: str, file: str) -> str:
    try:
        mode = Path(file).stat().st_mode
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidParameter(flag, f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidParameter(flag, f"{file} is not UTF-8 at byte {error.start}") from None
    if mode & TOO_OPEN:
        raise InvalidParameter(flag, f"{file} is open to others (mode {stat.S_IMODE(mode):04o}): chmod 600 {file}")
    return text
