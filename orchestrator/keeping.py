"""How long the session log is kept, and what it survives: the options of every command that runs an orchestrator."""

from __future__ import annotations

import argparse

# Seconds for which an ended session can be watched again.
RETENTION_S = 3600.0


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """How the session log is kept, --redis-url apart, whose default differs."""
    group = parser.add_argument_group("session log")
    group.add_argument(
        "--durability",
        default="",
        metavar="LEVEL",
        help="what an acknowledged token survives: memory, redis, redis-fsync or redis-wait:N "
        "(default: memory or redis, as the URL says)",
    )
    group.add_argument(
        "--retention",
        type=float,
        default=RETENTION_S,
        metavar="S",
        help="keep prompt and text so long after a session's end (default: %(default)g s)",
    )
