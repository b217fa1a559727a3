"""Sizes as people write them."""

from __future__ import annotations

import pytest

from specwire.core.invalid import InvalidParameter
from specwire.rpc.model_service import size_of


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("100", 100), ("2K", 2048), ("512m", 512 << 20), ("1.5G", 3 << 29), ("1T", 1 << 40)]
)
def test_a_size(text: str, size: int) -> None:
    assert size_of("kv-memory", text) == size


@pytest.mark.parametrize("text", ["", "G", "0", "-1", "1.2.3M", "1 G", "2GB", "inf", "nan", "1e9", "0.0001K"])
def test_no_size(text: str) -> None:
    with pytest.raises(InvalidParameter, match="kv-memory: must be a size such as 512M or 1.5G, not "):
        size_of("kv-memory", text)


def test_none() -> None:
    assert size_of("kv-memory", None) is None
