"""The file of `specwire deploy`: what it may say, and how it is refused."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from deploy.cli import main as cli
from deploy.cluster import fleet
from deploy.cluster.commands import carried_out, counts_of, drain_timeout_of, table
from deploy.cluster.replica import ReplicaSpec, command
from deploy.cluster.rollout import ReplicaName
from deploy.cluster.schema import InvalidConfig, ScalingRule, parse, ray_token

SMALLEST = """
redis: redis://127.0.0.1:6379/0
pools:
  large: {kind: verify, model: "scripted:7"}
"""
WHOLE = """
redis: redis://:secret@127.0.0.1:6379/0
registry: redis://127.0.0.1:6380/0
region: eu-1
runtime_env: {env_vars: {A: b}}
pools:
  large:
    kind: verify
    model: "scripted:7"
    resources: {big: 1}
    accelerator_type: H100
    num_gpus: 2
    num_cpus: 4
    engine: vllm
    tensor_parallel_size: 2
    min_replicas: 1
    max_replicas: 4
    options: {slots: 64, ngram: false, insecure: true, log_format: json}
  small: {kind: draft, model: "scripted:8", num_cpus: 0.5}
orchestrators:
  count: 2
  grpc_port: 50051
  http_port: 0
  options: {insecure: true}
"""


def test_the_smallest_file() -> None:
    config = parse(SMALLEST)
    large, orchestrators = config.groups
    assert (large.words, large.least, large.most, large.num_cpus) == (
        ("verify", "scripted:7", "--grace=120"),
        1,
        1,
        1.0,
    )
    assert (orchestrators.words, orchestrators.port, orchestrators.http_port) == (("orchestrate",), 0, -1)
    assert config.registry == orchestrators.environment["SPECWIRE_REDIS_URL"] == "redis://127.0.0.1:6379/0"


def test_the_whole_file() -> None:
    config = parse(WHOLE)
    large, small, orchestrators = config.groups
    assert large.words[:4] == ("verify", "scripted:7", "--engine=vllm", "--tensor-parallel-size=2")
    assert large.words[4:] == ("--grace=120", "--slots=64", "--no-ngram", "--insecure", "--log-format=json")
    assert (large.resources, large.accelerator_type, large.num_gpus, large.most) == ({"big": 1.0}, "H100", 2.0, 4)
    assert small.runtime_env == {"env_vars": {"A": "b"}}
    assert large.environment == {"SPECWIRE_REGISTRY": "redis://127.0.0.1:6380/0", "SPECWIRE_REGION": "eu-1"}
    assert (orchestrators.least, orchestrators.most, orchestrators.port, orchestrators.http_port) == (2, 2, 50051, 0)


def test_passwords_are_in_no_command_line() -> None:
    assert not any("secret" in word for group in parse(WHOLE).groups for word in group.words)


@pytest.mark.parametrize(
    ("now", "then", "named"),
    [
        ("kind: verify, ", "", "pools.large.kind: is missing"),
        ("kind: verify", "kind: guess", "pools.large.kind: must be one of verify, draft, not 'guess'"),
        ("kind: verify", "kind: draft", "pools: at least one of kind verify is needed"),
        ('model: "scripted:7"', "model: 7", "pools.large.model: must be a text, not 7"),
        ("large:", "Large!:", "pools: a name must be .*, not 'Large!'"),
        ("large:", "orchestrators:", "pools: a name must be .* not orchestrators"),
        ("verify,", "verify, num_cpus: -1,", r"pools.large.num_cpus: must be a number from 0 to \d+, not -1"),
        ("verify,", "verify, num_gpus: many,", "pools.large.num_gpus: .* not 'many'"),
        ("verify,", "verify, min_replicas: 1.5,", "pools.large.min_replicas: must be a whole number .* not 1.5"),
        ("verify,", "verify, min_replicas: 3, max_replicas: 2,", "pools.large.max_replicas: .* from 3 to 1024, not 2"),
        ("verify,", "verify, resources: [a],", r"pools.large.resources: must be a mapping, not \['a'\]"),
        ("verify,", "verify, resources: {a: b},", "pools.large.resources.a: .* not 'b'"),
        ("verify,", "verify, replicas: 2,", "pools.large.replicas: is not known"),
        ("verify,", "verify, options: {slot: 2},", "pools.large.options: unrecognized arguments: --slot=2"),
        ("verify,", "verify, options: {slots: x},", "pools.large.options: --slots: must be a whole number, not 'x'"),
        ("verify,", "verify, options: {fast: true},", "pools.large.options: unrecognized arguments: --fast"),
        ("verify,", "verify, options: {fast: false},", "pools.large.options: --fast: is not known"),
        ("verify,", "verify, options: {heads: true},", "pools.large.options: --heads: expected one argument"),
        ("verify,", "verify, options: {slots: {a: 1}},", "pools.large.options: --slots: must be a value"),
        ("verify,", "verify, options: {listen: 'a:1'},", "pools.large.options.listen: is said by the deployment"),
        ("verify,", "verify, scaling: {fast: 1},", "pools.large.scaling.fast: is not known"),
        ("verify,", "verify, scaling: {high: 2},", "pools.large.scaling.high: must be a number from 0 to 1, not 2"),
        ("verify,", "verify, scaling: {queue_s: long},", "pools.large.scaling.queue_s: .* not 'long'"),
        ("verify,", "verify, scaling: {high: 0.4},", "pools.large.scaling: occupancy: must be 0 < low < high <= 1"),
        ("pools:", "region: in/out\npools:", "region: must be .* not 'in/out'"),
        ("redis: redis://", "redis: radish://", "registry: .*radish"),
        ("redis:", "rediss:", "redis: is missing"),
        ("pools:", "more: 1\npools:", "more: is not known"),
        ("pools:", "orchestrators: {count: 0}\npools:", "orchestrators.count: .* not 0"),
        ("pools:", "orchestrators: {grpc_port: 70000}\npools:", "orchestrators.grpc_port: .* not 70000"),
        ("pools:", "orchestrators: {options: {plan: }}\npools:", "orchestrators.options: --plan: must be a value"),
        ("pools:", "pools: {", "file: is no YAML"),
    ],
)
def test_what_is_wrong_is_named(now: str, then: str, named: str) -> None:
    assert now in SMALLEST
    with pytest.raises(InvalidConfig, match=f"^{named}"):
        parse(SMALLEST.replace(now, then, 1))


@pytest.mark.parametrize("text", ["", "[]", "1", "pools: 3\nredis: redis://a:1"])
def test_what_is_no_configuration(text: str) -> None:
    with pytest.raises(InvalidConfig):
        parse(text)


def test_a_verifier_on_vllm_may_be_split_and_has_a_python_of_its_own() -> None:
    """A pool's head, too, goes to its replicas by name: the machine that deploys may not have it."""
    more = "pipeline_parallel_size: 2\n    python: /opt/vllm/bin/python\n    engine_options: {enforce_eager: true}"
    text = WHOLE.replace("tensor_parallel_size: 2", f"tensor_parallel_size: 2\n    {more}")
    large = parse(text.replace("num_gpus: 2", "num_gpus: 4").replace("{slots", "{heads: /models/head, slots")).groups[0]
    sizes = ("--tensor-parallel-size=2", "--pipeline-parallel-size=2")
    assert large.words[2:6] == ("--engine=vllm", *sizes, '--engine-options={"enforce_eager": true}')
    assert (large.words[7], large.ranks, large.python) == ("--heads=/models/head", 4, "/opt/vllm/bin/python")
    assert fleet._bundle(large) == {"CPU": 4.0, "GPU": 4.0, "big": 1.0, "accelerator_type:H100": 0.001}
    order = ReplicaSpec(large.words, large.port, large.http_port, large.environment, large.python)
    assert command(order, "10.0.0.1")[:4] == ["/opt/vllm/bin/python", "-m", "deploy", "verify"]


@pytest.mark.parametrize(
    ("now", "then", "named"),
    [
        ("num_cpus: 0.5", "tensor_parallel_size: 2", "small.tensor_parallel_size: is of engine: vllm only, not 2"),
        ("num_cpus: 0.5", "engine: vllm", "small.engine: is of verifiers only, not vllm"),
        ("num_cpus: 0.5", "engine_options: {a: true}", "small.engine_options: are of engine: vllm only"),
        ("num_cpus: 0.5", "options: {heads: h}", "small.options: unrecognized arguments: --heads=h"),
        ("engine: vllm", "engine: own", "large.options: .*--engine: must be one of specwire, vllm, not 'own'"),
        ("num_gpus: 2", "num_gpus: 1", "large.num_gpus: must be at least 2, one for each rank, or 0, not 1"),
        ("engine: vllm", "engine: specwire", "large.tensor_parallel_size: is of engine: vllm only, not 2"),
        ("num_cpus: 4", "python: opt/python", "large.python: must be an absolute path on the nodes, not 'opt/python'"),
        (
            "num_cpus: 4",
            "pipeline_parallel_size: 33",
            "large.pipeline_parallel_size: must be at most 32 beside tensor_parallel_size 2, not 33",
        ),
        (
            "engine: vllm\n    tensor_parallel_size: 2",
            "engine: specwire\n    pipeline_parallel_size: 2",
            "large.pipeline_parallel_size: is of engine: vllm only, not 2",
        ),
    ],
)
def test_how_a_pool_is_not_computed_is_named(now: str, then: str, named: str) -> None:
    assert now in WHOLE
    with pytest.raises(InvalidConfig, match=rf"^pools\.{named}"):
        parse(WHOLE.replace(now, then))


def test_a_digest_says_what_a_replica_is_made_by() -> None:
    large = parse(WHOLE).groups[0]
    assert parse(WHOLE).groups[0].digest == large.digest
    assert parse(WHOLE.replace("max_replicas: 4", "max_replicas: 5")).groups[0].digest == large.digest
    for now, then in (("slots: 64", "slots: 65"), ("num_cpus: 4", "num_cpus: 5"), ("A: b", "A: c"), ("eu-1", "eu-2")):
        assert parse(WHOLE.replace(now, then)).groups[0].digest != large.digest
    scaled = parse(WHOLE.replace("max_replicas: 4", "max_replicas: 4\n    scaling: {high: 0.9, queue_s: 2}")).groups[0]
    assert scaled.digest == large.digest
    assert scaled.rule == ScalingRule(1, 4, high=0.9, queue_s=2.0)
    assert [group.scales for group in parse(WHOLE).groups] == [True, False, False]


def test_who_drains_has_the_time_that_its_options_say() -> None:
    assert [group.grace for group in parse(WHOLE).groups] == [120.0, 3.0, 3.0]
    given = parse(WHOLE.replace("slots: 64", "slots: 64, grace: 7.5")).groups[0]
    assert given.grace == 7.5
    args = Namespace(drain_timeout=None)
    assert drain_timeout_of(args, parse(WHOLE)) == 150.0
    assert drain_timeout_of(Namespace(drain_timeout=5.0), parse(WHOLE)) == 5.0
    assert drain_timeout_of(args, None) == 30.0


def test_a_wrong_file_ends_the_command_before_there_is_any_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    for said in (f"{file}: cannot be read: No such file or directory", "pools.large.kind: must be one of "):
        assert cli.main(["deploy", str(file), "--ray-address", "127.0.0.1:1"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"specwire deploy: error: {said}")
        file.write_text(SMALLEST.replace("verify", "guess"))


TOKEN = "0123456789abcdef" * 4


@contextmanager
def guarded() -> Iterator[str]:
    """A control plane as Ray's, at this address: it knows no method, and says nothing to who has another token."""

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        if dict(context.invocation_metadata()).get("authorization") != f"Bearer {TOKEN}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: Authentication token is missing")
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    service, _, method = fleet.ANY_METHOD.strip("/").partition("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(ThreadPoolExecutor(1), handlers=[grpc.method_handlers_generic_handler(service, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0.0).wait()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user without any token of Ray's."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile does not stay
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_ray_that_demands_a_token_is_told_in_one_sentence(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ray itself says for a minute that the token is missing or incorrect."""
    remedy = "have RAY_AUTH_TOKEN_PATH name a file with what `ray get-auth-token` prints on its head\n"
    with guarded() as address:
        assert cli.main(["status", "--ray-address", address]) == 1
        said = capsys.readouterr().err
        assert said == f"specwire status: error: the Ray cluster at {address} demands a token: {remedy}"
        file = home / ".ray" / "auth_token"
        file.parent.mkdir()
        file.write_text(TOKEN[::-1])
        assert cli.main(["undeploy", "--ray-address", address]) == 1
        said = capsys.readouterr().err
        assert said == f"specwire undeploy: error: the Ray cluster at {address} refuses the token of {file}: {remedy}"
        file.write_text(f"{TOKEN}\n")
        fleet._show_token(address)  # is let in


def test_a_replica_that_goes_between_two_questions_needs_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has drained ends by itself, and Ray forgets its name whenever it notices."""
    told: list[str] = []
    known = {"replica:large:ab:0"}

    class Replica:
        def __init__(self, name: str) -> None:
            self.drain = SimpleNamespace(remote=lambda: told.append(f"drain {name}"))

    def get_actor(name: str) -> Replica:
        if name not in known:
            raise ValueError(f"Failed to look up actor with name {name!r}")
        known.remove(name)
        return Replica(name)

    monkeypatch.setattr("ray.get_actor", get_actor)
    monkeypatch.setattr("ray.kill", lambda actor: told.append("kill"))
    monkeypatch.setattr("ray.util.get_placement_group", get_actor)
    its = fleet.Fleet(told.append, 1.0, 1.0)
    name = ReplicaName("large", "ab", 0)
    its.kill(name)
    its.kill(name)
    assert told == ["kill"]
    known.add(str(name))
    its.retire(name)
    its.retire(name)
    assert told == ["kill", f"drain {name}"]
    assert its.places([name]) == {}


def test_what_was_set_aside_for_a_replica_that_cannot_begin_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two: its devices are free again, the first is ended, and the error is told."""
    told: list[str] = []
    group = parse(WHOLE).groups[0]
    first, second = (ReplicaName("large", group.digest, number) for number in (0, 1))

    def options(name: str, **_: object) -> SimpleNamespace:
        def remote(order: ReplicaSpec) -> str:
            if name == str(second):
                raise RuntimeError("no such environment")
            return name

        return SimpleNamespace(remote=remote)

    monkeypatch.setattr("ray.remote", lambda what: SimpleNamespace(options=options))
    monkeypatch.setattr("ray.util.placement_group", lambda bundles, strategy, name, lifetime: name)
    monkeypatch.setattr("ray.util.get_placement_group", str)
    monkeypatch.setattr("ray.util.remove_placement_group", lambda made: told.append(f"give back {made}"))
    monkeypatch.setattr("ray.get_actor", str)
    monkeypatch.setattr("ray.kill", lambda actor: told.append(f"kill {actor}"))
    with pytest.raises(RuntimeError, match="no such environment"):
        fleet.Fleet(told.append, 1.0, 1.0)._start(group, [first, second])
    assert told == [f"give back {second}", f"kill {first}", f"give back {first}"]


def test_a_token_is_found_where_ray_looks_for_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_token() == ("", "")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("of the home\n")
    assert ray_token() == ("of the home", str(home / ".ray" / "auth_token"))
    (home / "file").write_text("of a file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "file"))
    assert ray_token() == ("of a file", str(home / "file"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of a variable")
    assert ray_token() == ("of a variable", "$RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert ray_token() == ("", "")


def test_a_token_is_shown_without_being_asked_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray shows one to a cluster that runs only where this variable says so."""
    carried_out("status", lambda: 0)
    assert "RAY_AUTH_MODE" not in os.environ
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    carried_out("status", lambda: 0)
    assert os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("large", "POOL=N: must be a pool and a whole number, not 'large'"),
        ("large=-1", "POOL=N: .* not 'large=-1'"),
        ("larger=1", "POOL=N: there is no pool 'larger'; there are large, small, orchestrators"),
        ("large=5", r"pools.large: has from 1 \(min_replicas\) to 4 \(max_replicas\) replicas, not 5"),
        ("large=" + "9" * 5000, "pools.large: has from 1 .* replicas, not 999"),
        (
            "small=3",
            "pools.small: cannot be scaled from [12] to 3: .* add max_replicas, and deploy the file",
        ),
        ("orchestrators=7", "orchestrators.count: is [0-9]+, not 7: change it in the file, and deploy that"),
    ],
)
def test_what_cannot_be_scaled_is_named(word: str, named: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^{named}"):
        counts_of([word], parse(WHOLE))


def test_what_can_be_scaled() -> None:
    assert counts_of(["large=3", "small=1"], parse(WHOLE)) == {"large": 3, "small": 1}


def test_a_table_of_replicas() -> None:
    row = {"pool": "a", "replica": "replica:a:0:0", "state": "ready", "address": "h:1", "http": "", "node": "f" * 56}
    away = row | {"replica": "replica:a:0:10", "state": "away", "address": "", "node": ""}
    assert table([row, away]).splitlines() == [
        "replica:a:0:0   ready  h:1  -  ffffffffffff",
        "replica:a:0:10  away   -    -  -",
    ]
    assert table([]) == "nothing is deployed"
