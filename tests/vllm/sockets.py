"""Sockets of a process that other machines could reach, or that reach them."""

from __future__ import annotations

import psutil

LOOPBACK = ("127.", "::1", "::ffff:127.")


def reachable(pid: int) -> list[str]:
    """Local and remote addresses that are not this machine's loopback, of its sockets over IP."""
    open_ones = psutil.Process(pid).net_connections("inet")
    ends = [end for each in open_ones for end in (each.laddr, each.raddr) if end]
    return [f"{end.ip}:{end.port}" for end in ends if not end.ip.startswith(LOOPBACK)]
