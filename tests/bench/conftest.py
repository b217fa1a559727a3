"""What needs an extra that `make setup` leaves out is collected where it is there."""

from __future__ import annotations

from bench import openvino_rows

collect_ignore = [] if openvino_rows.installed() else ["test_openvino_peer.py"]
