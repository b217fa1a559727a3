from __future__ import annotations

import pytest

from specwire.core.invalid import InvalidParameter
from specwire.rpc.model_service import ModelServiceOptions


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"model": ""}, "model"),
        ({"model": "m", "listen": "host"}, "listen"),
        ({"model": "m", "listen": "host:70000"}, "listen"),
        ({"model": "m", "dtype": "int8"}, "dtype"),
        ({"model": "m", "device": ""}, "device"),
        ({"model": "m", "threads": 0}, "threads"),
        ({"model": "m", "slots": -1}, "slots"),
        ({"model": "m", "context": 1}, "context"),
    ],
)
def test_bad_options_name_their_field(options: dict[str, str | int], field: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{field}: "):
        ModelServiceOptions(**options)  # type: ignore[arg-type]  # any field, by name
