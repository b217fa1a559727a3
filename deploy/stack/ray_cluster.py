"""A local Ray, seen from the main process: a child process holds it, so that Ray's threads, signal handlers and exits
stay out of the orchestrator, and so that all of Ray's processes are one tree that can be ended.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.stack.options import StackError
from deploy.stack.processes import Child, environment
from specwire.rpc.server_options import ModelServiceOptions

# ----------------------------------------------------------------------------------------------------------------------
# What the process that hosts Ray is told, and what it answers: one JSON object a line.


@dataclass(frozen=True, slots=True)
class RayOrder:
    """What to host. Given as the process's one argument.

    directory: a private folder with a short path (Ray puts sockets below it, whose paths may have 107 bytes).
    services: options of each service by its role.
    start_timeout: seconds until every service must be healthy.
    """

    directory: str
    services: dict[str, ModelServiceOptions]
    start_timeout: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RayOrder:
        fields = json.loads(text)
        services = {}
        for role, options in fields["services"].items():
            options["references"] = tuple(options["references"])
            services[role] = ModelServiceOptions(**options)
        return RayOrder(fields["directory"], services, fields["start_timeout"])


@dataclass(frozen=True, slots=True)
class RayAnswer:
    """Either progress (once for each step), or the addresses (once), or an error (last)."""

    progress: str = ""
    addresses: dict[str, str] | None = None
    error: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RayAnswer:
        return RayAnswer(**json.loads(text))


RAY_AUTH_MODE = "RAY_AUTH_MODE"
STOP_GRACE = 8.0
ANSWER_SLACK = 10.0  # the process judges the deadline itself; this is for one that hangs
# Ray replaces a loopback address by the machine's own, and then listens on every interface, unless it takes itself for
# a Ray of one machine only. That is its way on desktops, and this is its name for it (read when ray is imported).
ONE_MACHINE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


class RayCluster:
    """Implements ServiceHost with Ray actors."""

    def __init__(
        self,
        services: dict[str, ModelServiceOptions],
        directory: Path,
        start_timeout: float,
        report: Callable[[str], None],
    ) -> None:
        self._order = RayOrder(str(directory), services, start_timeout)
        self._token = directory.with_suffix(".token")
        self._report = report
        self._child: Child | None = None

    async def start(self) -> dict[str, str]:
        if importlib.util.find_spec("ray") is None:
            raise StackError("Ray is not installed: install the extra specwire[ray], or use --no-ray")
        self._report("starting Ray")
        command = [sys.executable, "-m", "deploy.stack.ray_host", self._order.to_json()]
        # Killed, it could not end what Ray leaves behind.
        self._child = await Child.start(command, bound_by=0, env=private_environment(self._token))
        try:
            async with asyncio.timeout(self._order.start_timeout + ANSWER_SLACK):
                return await self._addresses(self._child)
        except TimeoutError:
            raise StackError(f"Ray did not start within {self._order.start_timeout:.0f} s") from None

    async def failed(self) -> str:
        if self._child is None:
            raise RuntimeError("failed() before start()")
        while (line := await self._child.line()) is not None:
            if error := RayAnswer.from_json(line).error:
                return error
        await self._child.wait()
        return f"the process that hosts Ray ended: {self._last_words(self._child)}"

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop(STOP_GRACE, None)

    async def _addresses(self, child: Child) -> dict[str, str]:
        while (line := await child.line()) is not None:
            answer = RayAnswer.from_json(line)
            if answer.error:
                raise StackError(answer.error)
            if answer.addresses is not None:
                return answer.addresses
            self._report(answer.progress)
        await child.wait()
        raise StackError(f"Ray did not start: {self._last_words(child)}")

    def _last_words(self, child: Child) -> str:
        return child.last_lines[-1] if child.last_lines else f"exit code {child.process.returncode}"


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


def private_environment(token: Path) -> dict[str, str]:
    """Ours, but Ray keeps to loopback and serves only who has the token that is written to the file `token`.

    Who may talk to Ray can run code as this user. Left alone, Ray takes a token from the user's home, where its file is
    readable by everybody, or none if the user's environment says so.
    """
    token.touch(0o600, exist_ok=False)
    token.write_text(secrets.token_hex(32))
    ours = {name: value for name, value in environment().items() if name != "RAY_AUTH_TOKEN"}
    return {**ours, **ONE_MACHINE, RAY_AUTH_MODE: "token", "RAY_AUTH_TOKEN_PATH": str(token)}
