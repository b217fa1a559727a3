"""Collects tests of an extra that `make setup` leaves out only where it is installed."""

from __future__ import annotations

from bench.peers import openvino_rows

collect_ignore = [] if openvino_rows.installed() else ["test_openvino_peer.py"]
