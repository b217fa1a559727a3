"""A Ray Serve application: what a file says, behind Serve's HTTP proxies. It is how KubeRay's RayService runs it.

    import_path: deploy.cluster.serving:app
    args: {config: /config/config.yaml, revision: "1"}

Its one replica has `specwire deploy` apply the file to the cluster that it runs on, then hands requests on to the
orchestrators there, and their answers back piece by piece. Every token takes two hops more than from an orchestrator
itself (docs/DEPLOY.md has what that costs), a stream ends with the replica that hands it on, and gRPC does not come in
this way. Needs ray[serve].
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deploy.cluster.rollout import replica_name
from deploy.cluster.schema import ORCHESTRATORS, parse, read_text
from deploy.stack.processes import environment

NAMESPACE = "specwire"
# What a Serve replica takes at once is bounded by the orchestrators, not here.
MOST_REQUESTS = 4096
# Streams that a replica still hands on when Serve wants to replace it.
GRACE_S = 600.0
LOOK_EVERY_S = 5.0
CONNECT_LIMIT_S = 2.0
DEPLOY_LIMIT_S = 3600.0
# Headers of one connection only (RFC 9110, 7.6.1).
OWN_HEADERS = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade")
)
SAID_ANEW = OWN_HEADERS | {"host", "content-length"}
UNAVAILABLE = 503


class Ingress:
    """What Serve runs. Raises InvalidConfig, ValueError or RuntimeError, by which Serve says why it does not.

    config: path of the file. revision: of it, by any name; Serve starts another replica when this changes, and so
        has the file applied again.
    """

    def __init__(self, config: str, revision: str) -> None:
        if not has_http(read_text(Path(config))):
            raise ValueError(f"{config}: {ORCHESTRATORS}.http_port: is needed for what comes in through Ray Serve")
        apply(config, ray.get_runtime_context().gcs_address)
        self._doors: list[str] = []
        self._looked = 0.0
        self._looking = asyncio.Lock()
        self._turns = itertools.count()
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, request: Request) -> Response:
        """Hand it to an orchestrator; to another one where that does not serve it at all."""
        body = await request.body()
        doors, first = await self._known(), next(self._turns)
        for attempt in range(len(doors)):
            answer = await self._ask(doors[(first + attempt) % len(doors)], request, body)
            if answer is not None and (answer.status != UNAVAILABLE or attempt == len(doors) - 1):
                headers = without(OWN_HEADERS, answer.headers)
                return StreamingResponse(pieces(answer), answer.status, headers)
            if answer is not None:
                answer.close()
            self._looked = 0.0
        told = {"message": "no orchestrator answers", "type": "server_error", "code": "unavailable"}
        return JSONResponse({"error": told}, UNAVAILABLE, {"Retry-After": "1"})

    async def _ask(self, door: str, request: Request, body: bytes) -> aiohttp.ClientResponse | None:
        """Pass a request on; None where the orchestrator cannot be reached. The reader releases the answer."""
        path = request.scope["path"] + (f"?{request.url.query}" if request.url.query else "")
        headers = without(SAID_ANEW, request.headers)
        try:
            return await self._own_session().request(
                request.method, door + path, data=body, headers=headers, allow_redirects=False
            )
        except aiohttp.ClientError:
            return None

    def _own_session(self) -> aiohttp.ClientSession:
        """Made in the loop that it is used in. A stream may last as long as it likes; the orchestrator bounds it."""
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S)
            self._session = aiohttp.ClientSession(timeout=limits, auto_decompress=False)
        return self._session

    async def _known(self) -> list[str]:
        """URLs of the orchestrators' front doors."""
        async with self._looking:
            if not self._doors or time.monotonic() - self._looked > LOOK_EVERY_S:
                self._doors = await front_doors()
                self._looked = time.monotonic()
        return self._doors


def has_http(text: str) -> bool:
    """Whether orchestrators of this file have a front door for HTTP."""
    group = parse(text).group(ORCHESTRATORS)
    return group is not None and group.http_port >= 0


async def front_doors() -> list[str]:
    """URLs of the orchestrators that are ready and answer."""
    listed = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
    ours = [str(each["name"]) for each in listed if each["namespace"] == NAMESPACE]
    names = [each for each in ours if (name := replica_name(each)) is not None and name.group == ORCHESTRATORS]
    found = await asyncio.gather(*map(_front_door, sorted(names)))
    return [door for door in found if door]


async def _front_door(name: str) -> str:
    try:
        actor: Any = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
        async with asyncio.timeout(CONNECT_LIMIT_S):
            return str((await actor.place.remote()).http)
    except (ValueError, TimeoutError, ray.exceptions.RayError):  # gone, or being started again
        return ""


def apply(config: str, address: str) -> None:
    """Run `specwire deploy` as a user would. Raises RuntimeError with the command's last line."""
    command = [sys.executable, "-m", "deploy", "deploy", config, "--ray-address", address, "--namespace", NAMESPACE]
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=DEPLOY_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"specwire deploy did not end within {DEPLOY_LIMIT_S:g} s") from None
    sys.stdout.write(done.stdout)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2] or f"specwire deploy ended with {done.returncode}")


def without(left_out: frozenset[str], headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in left_out}


async def pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body as it comes. Leaving early closes the connection, by which the orchestrator knows that nobody reads."""
    try:
        async for part in answer.content.iter_any():
            yield part
    finally:
        answer.close()


def app(args: dict[str, str]) -> Any:
    """The application, as Serve builds it from `args`: config, and revision if need be. Raises ValueError."""
    if not {"config"} <= args.keys() <= {"config", "revision"}:
        raise ValueError(f"args: must be config, the path of a file, and revision if need be, not {sorted(args)}")
    deployed = serve.deployment(
        name="ingress",
        num_replicas=1,
        max_ongoing_requests=MOST_REQUESTS,
        graceful_shutdown_timeout_s=GRACE_S,
        ray_actor_options={"num_cpus": 0},
    )
    return deployed(Ingress).bind(args["config"], args.get("revision", ""))
