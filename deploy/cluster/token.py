"""The token that a Ray cluster may demand of whoever speaks to it."""

from __future__ import annotations

import os
from pathlib import Path

RAY_AUTH_MODE = "RAY_AUTH_MODE"


def ray_token() -> tuple[str, str]:
    """The token that Ray's clusters may demand, and where it is from, for people; empty where there is none.

    Read from the places where Ray looks for it. Ray itself shows a token to a running cluster only if it is told to.
    """
    if os.environ.get(RAY_AUTH_MODE, "token") != "token":
        return "", ""
    if token := os.environ.get("RAY_AUTH_TOKEN", ""):
        return token, "$RAY_AUTH_TOKEN"
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_text(encoding="utf-8").strip(), str(file)
    except (OSError, UnicodeDecodeError):
        return "", ""
