"""Options of what serves: each that is wrong is named, and sizes are read as people write them."""

from __future__ import annotations

import pytest

from specwire.core.invalid import InvalidParameter
from specwire.rpc.server_options import ModelServiceOptions, size_of


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
        ({"model": "m", "engine": "own"}, "engine"),
        ({"model": "m", "engine": "vllm", "engine_options": "{"}, "engine-options"),
        ({"model": "m", "engine": "vllm", "engine_options": "[1]"}, "engine-options"),
        ({"model": "m", "engine_options": '{"enforce_eager": true}'}, "engine-options"),
        (
            {"model": "m", "tensor_parallel_size": 2},
            "tensor-parallel-size: is vLLM's, and goes with --engine vllm only",
        ),
        ({"model": "m", "pipeline_parallel_size": 2}, "pipeline-parallel-size"),
        (
            {"model": "m", "engine": "vllm", "tensor_parallel_size": 0},
            "tensor-parallel-size: must be from 1 to 64, not 0",
        ),
        ({"model": "m", "engine": "vllm", "tensor_parallel_size": 65}, "tensor-parallel-size"),
        ({"model": "m", "engine": "vllm", "pipeline_parallel_size": 0}, "pipeline-parallel-size"),
        (
            {"model": "m", "engine": "vllm", "tensor_parallel_size": 8, "pipeline_parallel_size": 9},
            "pipeline-parallel-size",
        ),
    ],
)
def test_bad_options_name_their_field(options: dict[str, str | int], field: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{field}"):
        ModelServiceOptions(**options)  # type: ignore[arg-type]  # any field, by name


@pytest.mark.parametrize(
    ("text", "size"), [("1", 1), ("100", 100), ("2K", 2048), ("512m", 512 << 20), ("1.5G", 3 << 29), ("1T", 1 << 40)]
)
def test_a_size(text: str, size: int) -> None:
    assert size_of("kv-memory", text) == size


@pytest.mark.parametrize("text", ["", "G", "0", "-1", "1.2.3M", "1 G", "2GB", "inf", "nan", "1e9", "0.0001K"])
def test_no_size(text: str) -> None:
    with pytest.raises(InvalidParameter, match="kv-memory: must be a size such as 512M or 1.5G, not "):
        size_of("kv-memory", text)
