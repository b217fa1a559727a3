"""The import contracts of pyproject.toml fire: each is broken here once, on a tree of empty packages."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [
    *("specwire", "specwire/v1", "specwire/core", "specwire/text", "specwire/lm", "specwire/rpc", "specwire/client"),
    *("specwire/telemetry", "specwire/registry", "specwire/redis", "specwire/sim", "specwire/vllm"),
    *("draft_service", "verify_service", "orchestrator", "deploy", "demo_pair"),
    *("specwire/core/law", "specwire/core/policy", "specwire/core/verify", "verify_service/engine"),
    *("orchestrator/api", "orchestrator/http", "orchestrator/http/openai", "orchestrator/ownership"),
    *("orchestrator/peers", "orchestrator/session"),
    *("deploy/cli", "deploy/cluster", "deploy/stack", "specwire/lm/runners", "specwire/lm/training"),
    *("specwire/core/draft", "specwire/core/session", "specwire/core/law/acceptance", "specwire/core/verify/session"),
    *("specwire/lm/guesses", "specwire/lm/heads", "specwire/lm/law", "specwire/lm/law/sampler"),
    *("draft_service/server", "demo_pair/train", "specwire/vllm/drafting"),
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make the empty tree, with the project's own contracts."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter inside the tree."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120.0, check=False)


def test_what_the_architecture_allows_is_kept(tree: Path) -> None:
    """The composition root may import everything, a service the shared library, lm torch."""
    (tree / "deploy/cli/up.py").write_text("import ray, orchestrator, draft_service, verify_service, demo_pair\n")
    (tree / "orchestrator/session/driver.py").write_text(
        "import asyncio, grpc, redis, specwire.core, specwire.rpc, specwire.text\n"
    )
    (tree / "verify_service/engine/engine.py").write_text("import specwire.lm, specwire.core\n")
    (tree / "specwire/lm/kv_cache.py").write_text("import torch, transformers\n")
    result = lint_imports(tree)
    assert result.returncode == 0, result.stdout


FORBIDDEN = [
    ("specwire/core/a.py", "time"),
    ("specwire/core/law/a.py", "specwire.core.policy"),
    ("specwire/lm/guesses/a.py", "specwire.lm.law.sampler"),
    ("specwire/lm/heads/a.py", "specwire.lm.law.sampler"),
    ("specwire/lm/a.py", "specwire.lm.law.sampler"),
    ("deploy/cli/a.py", "specwire.lm.law.sampler"),
    ("draft_service/a.py", "specwire.lm.law.sampler"),
    ("draft_service/server/a.py", "specwire.lm.law.sampler"),
    ("draft_service/a.py", "specwire.core.law.acceptance"),
    ("draft_service/server/a.py", "specwire.core.law.acceptance"),
    ("orchestrator/session/a.py", "specwire.core.verify.session"),
    ("specwire/core/policy/a.py", "specwire.core.law"),
    ("specwire/core/policy/a.py", "specwire.core.verify"),
    ("orchestrator/session/a.py", "orchestrator.ownership"),
    ("orchestrator/peers/a.py", "orchestrator.session"),
    ("orchestrator/http/endpoint.py", "orchestrator.http.openai"),
    ("deploy/stack/a.py", "deploy.cli"),
    ("specwire/core/a.py", "asyncio"),
    ("specwire/core/a.py", "random"),
    ("specwire/core/a.py", "grpc"),
    ("specwire/core/a.py", "specwire.v1"),
    ("specwire/core/a.py", "specwire.text"),
    ("specwire/text/a.py", "torch"),
    ("specwire/rpc/a.py", "transformers"),
    ("specwire/client/a.py", "specwire.lm"),
    ("specwire/client/a.py", "specwire.sim"),
    ("specwire/rpc/a.py", "specwire.registry"),
    ("specwire/registry/a.py", "torch"),
    ("specwire/lm/a.py", "specwire.rpc"),
    ("draft_service/a.py", "verify_service"),
    ("verify_service/a.py", "ray"),
    ("verify_service/a.py", "specwire.lm.training"),
    ("orchestrator/a.py", "torch"),
    ("orchestrator/a.py", "specwire.lm"),
    ("orchestrator/a.py", "draft_service"),
    ("orchestrator/a.py", "deploy"),
]


def test_what_it_forbids_is_broken(tree: Path) -> None:
    """A forbidden import, even inside a function, fails the gate and is named."""
    named = []
    for number, (module, imported) in enumerate(FORBIDDEN):
        file = tree / module.replace("a.py", f"a{number}.py")
        file.write_text(f"def sneak():\n    import {imported}\n")
        named.append(f"{file.relative_to(tree).with_suffix('')} -> {imported}".replace("/", "."))
    result = lint_imports(tree)
    assert result.returncode != 0
    assert [each for each in named if each not in result.stdout] == []


def test_every_room_stands_in_the_contract_of_its_package() -> None:
    """A room that no contract names may be imported by anybody."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    drawn = [(place, each["layers"]) for each in contracts for place in each.get("containers", ())]
    assert len(drawn) >= 6
    for place, layers in drawn:
        folder = ROOT / place.replace(".", "/")
        rooms = {each.stem for each in folder.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()}
        assert {each for each in rooms if not each.startswith("__")} == set(re.findall(r"\w+", " ".join(layers))), place
