"""From what is there to what is wanted: by table, and as laws over any state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.cluster.rollout import Change, ReplicaName, plan, removal, replica_name
from deploy.cluster.schema import ClusterConfig, parse

CONFIG = parse("""
redis: redis://127.0.0.1:6379/0
pools:
  large: {kind: verify, model: "scripted:7", min_replicas: 1, max_replicas: 3}
  small: {kind: draft, model: "scripted:8", min_replicas: 0, max_replicas: 2}
orchestrators: {grpc_port: 50051}
""")
LARGE, SMALL, FRONT = CONFIG.groups


def large(*numbers: int) -> list[ReplicaName]:
    return [ReplicaName("large", LARGE.digest, number) for number in numbers]


def older(*numbers: int, group: str = "large") -> list[ReplicaName]:
    return [ReplicaName(group, "00", number) for number in numbers]


def front(*numbers: int) -> list[ReplicaName]:
    return [ReplicaName("orchestrators", FRONT.digest, number) for number in numbers]


@pytest.mark.parametrize(
    ("seen", "counts", "what", "start", "drain"),
    [
        ([], {}, "created", large(0), []),
        (large(0), {}, "unchanged", [], []),
        (large(0, 2), {}, "unchanged", [], []),
        (large(0), {"large": 3}, "scaled", large(1, 2), []),
        (large(1), {"large": 3}, "scaled", large(0, 2), []),
        (large(0, 1, 2), {"large": 1}, "scaled", [], large(1, 2)),
        (large(0, 1, 2), {"large": 9}, "unchanged", [], []),
        (large(0, 1, 2, 3), {}, "scaled", [], large(3)),
        (older(0), {}, "replaced", large(0), older(0)),
        (older(0, 1), {}, "replaced", large(0, 1), older(0, 1)),
        (older(0, 1, 2, 3), {}, "replaced", large(0, 1, 2), older(0, 1, 2, 3)),
        ([*older(0, 1), *large(0)], {}, "replaced", large(1), older(0, 1)),
        ([*older(0, 1), *large(0, 1)], {}, "replaced", [], older(0, 1)),
    ],
)
def test_a_pool(
    seen: list[ReplicaName], counts: dict[str, int], what: str, start: list[ReplicaName], drain: list[ReplicaName]
) -> None:
    change = plan(CONFIG, seen, counts)[0]
    assert (change.what, list(change.start), list(change.drain)) == (what, start, drain)
    assert not change.drain_first


def test_a_pool_that_the_file_no_longer_has_goes_last() -> None:
    changes = plan(CONFIG, [*older(0, group="gone"), *large(0), *front(0)])
    assert [(each.group, each.what) for each in changes] == [
        ("large", "unchanged"),
        ("small", "unchanged"),
        ("orchestrators", "unchanged"),
        ("gone", "removed"),
    ]
    assert str(changes[-1]) == "gone: removed (1 -> 0)"


def test_who_holds_a_port_makes_room_for_the_successor() -> None:
    change = plan(CONFIG, [*large(0), *older(0, group="orchestrators")])[2]
    assert (change.what, change.drain_first, change.start) == ("replaced", True, tuple(front(0)))


def test_orchestrators_are_the_first_to_go() -> None:
    changes = removal([*large(0, 1), *front(0)])
    assert [change.group for change in changes] == ["orchestrators", "large"]
    assert changes[1].drain == tuple(large(0, 1))


@pytest.mark.parametrize("text", ["config:1", "replica:large:xyz:0", "replica:large:00", "replica:large:00:-1", ""])
def test_names_of_other_actors(text: str) -> None:
    assert replica_name(text) is None


NAMES = st.builds(
    ReplicaName,
    st.sampled_from(["large", "small", "orchestrators", "gone"]),
    st.sampled_from([LARGE.digest, SMALL.digest, FRONT.digest, "00"]),
    st.integers(0, 5),
)


def carried_out(seen: set[ReplicaName], changes: list[Change]) -> set[ReplicaName]:
    started = {name for change in changes for name in change.start}
    assert not started & seen
    return (seen | started) - {name for change in changes for name in change.drain}


@given(seen=st.sets(NAMES), counts=st.dictionaries(st.sampled_from(["large", "small"]), st.integers(0, 9)))
def test_once_carried_out_nothing_is_left_to_do(seen: set[ReplicaName], counts: dict[str, int]) -> None:
    after = carried_out(seen, plan(CONFIG, seen, counts))
    assert all(change.what == "unchanged" for change in plan(CONFIG, after))
    _holds(CONFIG, after)
    assert carried_out(after, removal(after)) == set()


@given(seen=st.sets(NAMES), done=st.integers(0, 3))
def test_a_deployment_that_was_broken_off_goes_on(seen: set[ReplicaName], done: int) -> None:
    halfway = carried_out(seen, plan(CONFIG, seen)[:done])
    _holds(CONFIG, carried_out(halfway, plan(CONFIG, halfway)))


def _holds(config: ClusterConfig, seen: set[ReplicaName]) -> None:
    digests = {group.name: group.digest for group in config.groups}
    assert all(digests.get(name.group) == name.digest for name in seen)
    for group in config.groups:
        assert group.least <= len([name for name in seen if name.group == group.name]) <= group.most


@given(name=NAMES)
def test_names_come_back(name: ReplicaName) -> None:
    assert replica_name(str(name)) == name
