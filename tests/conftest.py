"""What every test gets: one thread per library, reproducible property tests, and the fixtures that folders share.

Tests bind port 0 on 127.0.0.1 and read back what they got, or take one of `tests.ports`; none knows a fixed port.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.ports import free_address
from tests.thorough import ROOT, listed

# Set before a test imports numpy or torch: idle BLAS threads of several processes would fight over few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Texts are held against models that a test loads in float32, by torch; what `auto` is here must not decide that.
os.environ.setdefault("SPECWIRE_DTYPE", "float32")
os.environ.setdefault("SPECWIRE_RUNTIME", "torch")
# Nothing may be fetched: a test that names a hub model by mistake fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The gate tries the same examples every time. HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("gate", deadline=None, derandomize=True, database=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out."""
    thorough = listed()
    for item in items:
        file, inner = item.path.relative_to(ROOT).as_posix(), item.nodeid.split("::")[1:]
        if inner and f"{file}::{inner[0].partition('[')[0]}" in thorough:
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(scope="session", autouse=True)
def _runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the tests' commands away from the user's stacks, and the other way round."""
    folder = tmp_path_factory.mktemp("runtime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder


@pytest.fixture
def taken_address() -> Iterator[str]:
    """Give the address (host:port) of a socket that is listening for as long as the test runs."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def dead_address() -> str:
    """Give an address (host:port) at which nothing listens, and only the test itself will."""
    return free_address()
