"""Nothing that comes from outside is run: no pickle in any form, no eval, no code out of a model's folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "specwire",
    "draft_service",
    "verify_service",
    "orchestrator",
    "deploy",
    "demo_pair",
    "bench",
    "examples",
    "scripts",
)
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
PICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve"}
# These pickle what passes between processes that one program started: nothing that comes from outside. Only where a
# simulation runs on several cores; `deploy/` has Ray, which does it too (docs/SECURITY.md).
POOLS = {"multiprocessing", "ProcessPoolExecutor"}
POOLED = {"bench/harness/processes.py"}
# YAML is read by the loaders that make plain values only.
YAML_LOADERS = ("yaml.load", "yaml.load_all", "yaml.compose", "yaml.parse")
YAML_RUNNERS = ("yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all")
RUNNERS = {"eval", "exec", "__import__"}


def offences(source: str) -> list[str]:
    return [offence for node in ast.walk(ast.parse(source)) for offence in _offences(node)]


def _offences(node: ast.AST) -> Iterator[str]:
    pickling = PICKLERS | POOLS
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in pickling)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in pickling:
        yield (node.module or "").partition(".")[0]
    elif isinstance(node, ast.ImportFrom | ast.Attribute) and POOLS & _named(node):
        yield "ProcessPoolExecutor"
    elif isinstance(node, ast.Call):
        yield from _called(node)


def _named(node: ast.ImportFrom | ast.Attribute) -> set[str]:
    return {node.attr} if isinstance(node, ast.Attribute) else {alias.name for alias in node.names}


def _called(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in RUNNERS:
        yield name
    loader = given.get("Loader")
    if name in YAML_RUNNERS or (name in YAML_LOADERS and (loader is None or "Safe" not in ast.unparse(loader))):
        yield name
    if name.endswith("torch.load") and not _is(given.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if name.endswith(("np.load", "numpy.load")) and "allow_pickle" in given:
        yield "numpy.load with allow_pickle"
    if "trust_remote_code" in given and not _is(given["trust_remote_code"], False):
        yield "trust_remote_code"
    if "shell" in given and not _is(given["shell"], False):
        yield "shell"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import torch, dill",
        "from cloudpickle import loads",
        "from multiprocessing import get_context",
        "from concurrent.futures import ProcessPoolExecutor",
        "concurrent.futures.ProcessPoolExecutor()",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "np.load(path, allow_pickle=True)",
        "eval('1')",
        "yaml.load(text)",
        "yaml.compose(text, Loader=yaml.FullLoader)",
        "yaml.unsafe_load(text)",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_each_offence_is_found(source: str) -> None:
    assert offences(source)


def test_what_is_harmless_is_not() -> None:
    assert offences("torch.load(path, weights_only=True); re.compile('x'); model.eval()") == []


def test_no_file_runs_what_it_is_given() -> None:
    assert len(FILES) > 100
    found = {str(file.relative_to(ROOT)): set(offences(file.read_text())) for file in FILES}
    assert {file for file, named in found.items() if named & POOLS} == POOLED
    assert {file: named - POOLS for file, named in found.items() if named - POOLS} == {}
