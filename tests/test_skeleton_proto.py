"""scripts.proto: the committed stubs are what the sources give, and every kind of drift is named."""

from pathlib import Path

from scripts import proto
from specwire.v1 import draft_pb2_grpc, generation_pb2_grpc, verify_pb2, verify_pb2_grpc


def test_stubs_import_by_their_package() -> None:
    """`from specwire.v1 import ...` works, as protoc's own cross-imports need."""
    assert verify_pb2.DESCRIPTOR.package == "specwire.v1"
    for module, service in [
        (verify_pb2_grpc, "Verify"),
        (draft_pb2_grpc, "Draft"),
        (generation_pb2_grpc, "Generation"),
    ]:
        assert hasattr(module, f"{service}ServiceStub")


def test_committed_stubs_match_their_sources() -> None:
    """What `make proto` would write is what is there."""
    assert proto.differences(proto.wanted(), proto.ROOT / proto.PACKAGE) == []


def test_every_drift_is_named_and_a_write_removes_what_has_no_source_and_nothing_else(tmp_path: Path) -> None:
    """A missing, a stale and a changed file each get a line of their own; files that protoc does not make stay."""
    (tmp_path / "same_pb2.py").write_text("same")
    (tmp_path / "changed_pb2.py").write_text("old")
    (tmp_path / "stale_pb2.pyi").write_text("")
    (tmp_path / "__init__.py").write_text("kept")
    want = {"same_pb2.py": "same", "changed_pb2.py": "new", "missing_pb2_grpc.py": "text"}
    assert proto.differences(want, tmp_path) == [
        "missing_pb2_grpc.py: missing",
        "stale_pb2.pyi: has no source",
        "changed_pb2.py: differs from its source",
    ]
    proto.write(want, tmp_path)
    assert proto.differences(want, tmp_path) == []
    assert (tmp_path / "__init__.py").read_text() == "kept"
