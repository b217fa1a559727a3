"""The files below deploy/ are what their readers take, as far as that can be told without these programs."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray.autoscaler
import yaml

from bench.harness.certificates import Authority
from deploy.cli import main as cli
from deploy.cli.services import edge
from deploy.cluster.schema import parse
from orchestrator.server import options_of
from specwire.registry.options import registry_of
from specwire.rpc.server_options import model_options

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
# What begins a command of ours, where a container's image begins it itself.
NAMES = ("verify", "draft", "orchestrate", "edge", "deploy")


def documents(file: Path) -> list[dict[str, Any]]:
    """Of a YAML file, each a mapping."""
    found = list(yaml.safe_load_all(file.read_text()))
    assert found, file
    assert all(isinstance(each, dict) for each in found), file
    return found


def manifests() -> list[Path]:
    """What is applied on Kubernetes; not what kustomize or specwire itself reads."""
    return sorted(each for each in KUBERNETES.rglob("*.yaml") if each.name not in ("kustomization.yaml", "config.yaml"))


def units() -> list[Path]:
    return sorted((DEPLOY / "systemd").glob("*.service"))


def unit(file: Path) -> configparser.ConfigParser:
    """Options keep their case; one that stands there several times has its last value."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(file.read_text())
    return parser


def mappings(value: object) -> Iterator[dict[str, Any]]:
    """All mappings in a document, however deep."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from mappings(each)


def commands() -> Iterator[tuple[Path, list[str]]]:
    """Each of our command lines after `specwire`, with the file that has it."""
    for file in [*manifests(), DEPLOY / "compose/compose.yaml"]:
        for document in documents(file):
            for each in mappings(document):
                words = each.get("args") or each.get("command")
                if isinstance(words, list) and words and words[0] in NAMES:
                    yield file, words
    for file in units():
        words = unit(file)["Service"]["ExecStart"].split()
        assert words[0].endswith("/specwire"), file
        yield file, words[1:]
    for file in sorted((DEPLOY / "docker").iterdir()):
        entry, default = (json.loads(found) for found in instructions(file, "ENTRYPOINT") + instructions(file, "CMD"))
        assert entry == ["specwire"], file
        yield file, default


def instructions(file: Path, name: str) -> list[str]:
    """The arguments of each such instruction of a Dockerfile, lines joined."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", file.read_text()))
    return re.findall(rf"(?m)^{name} (.*)$", text)


COMMANDS = list(commands())
COMPOSE = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
# Manifests are held against its schemas; it need not be the one that runs.
KUBERNETES_VERSION = "1.32"
QUANTITY = re.compile(r"\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?")
CLUSTER_FILES = [DEPLOY / "ray/config.yaml", KUBERNETES / "ray/config.yaml"]


def named(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else ""


@pytest.mark.parametrize(("file", "words"), COMMANDS, ids=named)
def test_commands_parse(file: Path, words: list[str]) -> None:
    if words == ["--help"]:
        return
    here = [str(DEPLOY / "systemd" / Path(word).name) if word.startswith("/etc") else word for word in words]
    args = cli.parse(here)
    if args.command in ("verify", "draft") and args.insecure:
        assert model_options(args).listen == args.listen
        registry_of(args).check_listen(args.listen)
    if args.command == "orchestrate":
        assert options_of(args).registration.url


def test_every_service_is_there() -> None:
    assert {words[0] for _, words in COMMANDS} == {"verify", "draft", "orchestrate", "edge", "deploy", "--help"}
    assert len(COMMANDS) >= 11


def test_the_edge_of_the_unit_needs_what_the_unit_installs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is the extra llamacpp: nothing of the extra http is there."""
    monkeypatch.setattr("orchestrator.options.http_is_installed", lambda: False)
    Authority().save(tmp_path, "ca")
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    token.chmod(0o600)
    config = tmp_path / "edge.yaml"
    config.write_text((DEPLOY / "systemd/edge.yaml").read_text().replace("/etc/specwire", str(tmp_path)))
    options = edge.options_of(cli.parse(["edge", "--config", str(config)]))
    assert options.drafting.model.endswith(".gguf")
    assert not options.serving.http


@pytest.mark.parametrize("file", CLUSTER_FILES, ids=named)
def test_cluster_configurations_can_be_placed(file: Path) -> None:
    """Every custom resource that a replica asks for is what some node has."""
    config = parse(file.read_text())
    asked = {name for group in config.groups for name in group.resources}
    if file.parent.parent == KUBERNETES:
        groups = documents(file.parent / "raycluster.yaml")[0]["spec"]["workerGroupSpecs"]
        had = {name for each in groups for name in json.loads(json.loads(each["rayStartParams"]["resources"]))}
    else:
        types = documents(DEPLOY / "ray/cluster.yaml")[0]["available_node_types"]
        had = {name for each in types.values() for name in each["resources"]}
    assert asked <= had


def test_ray_up_takes_its_cluster() -> None:
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    cluster = documents(DEPLOY / "ray/cluster.yaml")[0]
    jsonschema.validate(cluster, schema)
    types = cluster["available_node_types"]
    assert cluster["head_node_type"] in types
    assert sum(each.get("max_workers", 0) for each in types.values()) <= cluster["max_workers"]


# --- Kubernetes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", manifests(), ids=named)
def test_kubernetes_takes_them(file: Path) -> None:
    """By its schemas, which know every kind and key. A patch is an object without what it leaves to others."""
    for each in documents(file):
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", each["metadata"]["name"])
        if "overlays" in file.parts:
            each = {**each, "spec": {"selector": {}, **each["spec"]}}
        for whole in of_kubernetes(each):
            kubernetes_validate.validate(whole, KUBERNETES_VERSION, strict=True)


def of_kubernetes(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The document; of one that KubeRay reads, its pods."""
    if document["kind"] != "RayCluster":
        yield document
        return
    assert document["apiVersion"] == "ray.io/v1"
    for group in (document["spec"]["headGroupSpec"], *document["spec"]["workerGroupSpecs"]):
        yield {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pods"}, "template": group["template"]}


def pods(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (found for found in mappings(document) if isinstance(found.get("containers"), list))


@pytest.mark.parametrize("file", manifests(), ids=named)
def test_pods_fit_what_is_around_them(file: Path) -> None:
    for each in documents(file):
        for pod in pods(each):
            volumes = {volume["name"] for volume in pod.get("volumes", [])}
            volumes |= {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", [])}
            for container in pod["containers"]:
                assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
                check_container(container, file)


@pytest.mark.parametrize("file", manifests(), ids=named)
def test_pods_may_do_no_more_than_they_need(file: Path) -> None:
    """What the namespace's label lets in, and no key to Kubernetes but for Ray's head, whose autoscaler needs one."""
    if "overlays" in file.parts:
        return  # patches of what is held here already
    for each in documents(file):
        for pod in pods(each):
            names = {container["name"] for container in pod["containers"]}
            assert pod.get("automountServiceAccountToken", True) is (names == {"ray-head"}), names
            context = pod["securityContext"]
            assert (context["runAsNonRoot"], context["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
            assert context["runAsUser"] > 0
            for container in pod["containers"]:
                check_confined(container["securityContext"])
        for options in [found["autoscalerOptions"] for found in mappings(each) if "autoscalerOptions" in found]:
            check_confined(options["securityContext"])


def check_confined(context: dict[str, Any]) -> None:
    assert (context["allowPrivilegeEscalation"], context["capabilities"]) == (False, {"drop": ["ALL"]})


def test_the_namespace_lets_in_confined_pods_only() -> None:
    labels = documents(KUBERNETES / "common/namespace.yaml")[0]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for folder in ("base", "ray"):
        assert "../common" in documents(KUBERNETES / folder / "kustomization.yaml")[0]["resources"]


def check_container(container: dict[str, Any], file: Path) -> None:
    for amounts in container["resources"].values():
        assert all(QUANTITY.fullmatch(str(amount)) for amount in amounts.values())
    ports = {port["containerPort"] for port in container.get("ports", [])}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        for kind in ("grpc", "httpGet"):
            probe = container.get(name, {}).get(kind)
            assert probe is None or probe["port"] in ports
    said = {int(word.rpartition(":")[2]) for word in container.get("args", []) if re.match(r"--\w+=0\.0\.0\.0:", word)}
    assert not said or said == ports or "overlays" in file.parts


@pytest.mark.parametrize("file", manifests(), ids=named)
def test_selectors_find_their_pods(file: Path) -> None:
    """Within the folder that is applied together."""
    labels = [
        found["labels"]
        for neighbour in file.parent.glob("*.yaml")
        for document in documents(neighbour)
        for found in mappings(document)
        if isinstance(found.get("labels"), dict)
    ]
    for each in documents(file):
        selector = each["spec"].get("selector") if "spec" in each else None
        wanted = (selector or {}).get("matchLabels", selector) or {}
        if each["kind"] != "PersistentVolumeClaim" and wanted:
            assert any(wanted.items() <= found.items() for found in labels)


@pytest.mark.parametrize("file", sorted(KUBERNETES.rglob("kustomization.yaml")), ids=named)
def test_kustomizations_find_their_files(file: Path) -> None:
    """Files below the folder, and other folders: kustomize refuses files that stand elsewhere."""
    found = documents(file)[0]
    assert (found["apiVersion"], found["kind"]) == ("kustomize.config.k8s.io/v1beta1", "Kustomization")
    for name in found["resources"]:
        path = file.parent / name
        assert (path / "kustomization.yaml").is_file() if name.startswith("..") else path.is_file()
    for patch in found.get("patches", []):
        assert (file.parent / patch["path"]).is_file()
    for generated in found.get("configMapGenerator", []):
        assert all((file.parent / name).is_file() for name in generated["files"])
    if "patches" not in found:
        here = {each.name for each in file.parent.glob("*.yaml")} - {"kustomization.yaml", "config.yaml"}
        assert here == {name for name in found["resources"] if not name.startswith("..")}


def test_the_overlay_patches_what_is_there() -> None:
    patch, patched = (documents(KUBERNETES / f"{name}/verifier.yaml")[0] for name in ("overlays/gpu", "base"))
    assert (patch["kind"], patch["metadata"]["name"]) == (patched["kind"], patched["metadata"]["name"])
    names = {pod["containers"][0]["name"] for each in (patch, patched) for pod in pods(each)}
    assert len(names) == 1


def test_the_job_reads_the_generated_configuration() -> None:
    pod = documents(KUBERNETES / "ray/deploy-job.yaml")[0]["spec"]["template"]["spec"]
    generated = documents(KUBERNETES / "ray/kustomization.yaml")[0]["configMapGenerator"][0]
    assert pod["volumes"][0]["configMap"]["name"] == generated["name"]
    args, folder = pod["containers"][0]["args"], pod["containers"][0]["volumeMounts"][0]["mountPath"]
    assert args[1] == f"{folder}/{generated['files'][0]}"
    cluster = documents(KUBERNETES / "ray/raycluster.yaml")[0]
    assert args[3] == f"ray://{cluster['metadata']['name']}-head-svc:10001"
    assert cluster["spec"]["rayVersion"] == ray.__version__


def test_more_time_to_end_than_services_take() -> None:
    for file, words in COMMANDS:
        grace = next((float(word.removeprefix("--grace=")) for word in words if word.startswith("--grace=")), None)
        if grace is not None and "overlays" not in file.parts:
            pod = next(each for document in documents(file) for each in pods(document))
            assert pod["terminationGracePeriodSeconds"] >= grace + 10


# --- Docker, compose, systemd, observability --------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted((DEPLOY / "docker").iterdir()), ids=named)
def test_dockerfiles(file: Path) -> None:
    known = "FROM|ARG|WORKDIR|COPY|RUN|ENV|USER|STOPSIGNAL|ENTRYPOINT|CMD"
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", file.read_text()))
    assert all(re.match(rf"(?:{known}) \S", line) for line in text.splitlines() if line)
    for copied in instructions(file, "COPY"):
        *sources, _ = [word for word in copied.split() if not word.startswith("--from")]
        assert copied.startswith("--from") or all((ROOT / source).exists() for source in sources)
    packages = re.search(r"(?m)^packages = (\[.*\])", (ROOT / "pyproject.toml").read_text())
    assert packages is not None
    assert {f"{name} {name}" for name in json.loads(packages[1])} <= set(instructions(file, "COPY"))
    extras = set(re.findall(r"'\.\[(.*)\]'", text)[0].split(","))
    assert extras <= set(re.findall(r"(?m)^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text()))


def test_compose_is_whole() -> None:
    services = COMPOSE["services"]
    known = {"image", "command", "restart", "stop_grace_period", "depends_on", "volumes", "networks", "healthcheck"}
    for service in services.values():
        assert service.keys() <= known | {"ports", "user", "cap_drop", "security_opt"}
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        assert set(service["networks"]) <= COMPOSE["networks"].keys()
        assert set(service.get("depends_on", {})) <= services.keys()
        assert all(services[name].get("healthcheck") for name in service.get("depends_on", {}))
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or source.startswith("${")
    assert set(services) == {"redis", "verifier", "drafter", "orchestrator"}


def test_compose_publishes_on_loopback_only() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert COMPOSE["networks"]["inside"]["internal"] is True
    inside = [name for name, service in COMPOSE["services"].items() if "outside" not in service["networks"]]
    assert inside == ["redis", "verifier", "drafter"]


@pytest.mark.parametrize("file", units(), ids=named)
def test_units_are_whole(file: Path, tmp_path: Path) -> None:
    """Where systemd is, it has nothing to say against them; for the program that one starts another one stands in."""
    found = unit(file)
    assert found.sections() == ["Unit", "Service", "Install"]
    service = found["Service"]
    assert (service["User"], service["Restart"], service["KillSignal"]) == ("specwire", "always", "SIGTERM")
    assert found["Install"]["WantedBy"] == "multi-user.target"
    program = shutil.which("systemd-analyze")
    if program is None:
        return
    copy = tmp_path / file.name
    copy.write_text(file.read_text().replace("/opt/specwire/bin/specwire", "/bin/true"))
    done = subprocess.run([program, "verify", copy], capture_output=True, text=True, timeout=120.0, check=False)
    assert file.name not in done.stderr, done.stderr


def test_grafana_and_prometheus_find_their_files() -> None:
    source = documents(DEPLOY / "observability/grafana/provisioning/datasources/specwire.yml")[0]
    assert [each["type"] for each in source["datasources"]] == ["prometheus"]
    provider = documents(DEPLOY / "observability/grafana/provisioning/dashboards/specwire.yml")[0]["providers"][0]
    assert provider["type"] == "file"
    assert provider["options"]["path"].startswith("/")
    scraped = documents(DEPLOY / "observability/prometheus.yml")[0]
    assert all((DEPLOY / "observability" / name).is_file() for name in scraped["rule_files"])
