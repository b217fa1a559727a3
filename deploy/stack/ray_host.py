"""The process that holds the local Ray: starts it, the verifier's and the drafter's actors, and waits for stdin's end.

``python -m deploy.stack.ray_host ORDER`` with RayOrder as JSON; RayAnswer lines on stdout.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from deploy.stack.options import StackError, kind_of
from deploy.stack.processes import end_descendants
from deploy.stack.ray_actors import ACTORS, ThreadOutcome
from deploy.stack.ray_cluster import RayAnswer, RayOrder
from specwire.rpc.process import one_line
from specwire.rpc.server_options import ModelServiceOptions

NAMESPACE = "specwire"
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20  # Ray's least is 75 MiB; no token travels through it
STOP_LIMIT = 2.0
# Actors ask Ray for no GPU, because options name the device. Without this some releases would hide all GPUs.
HIDE_DEVICES = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"
# By default Ray's workers give way to everything else on the machine (niceness 15), clients included; but all wait for
# a verifier.
NICENESS = "RAY_worker_niceness"


Say = Callable[[RayAnswer], None]


def main() -> None:
    order = RayOrder.from_json(sys.argv[1])
    say = Answers().say
    parent = Parent()
    try:
        _start_ray(order)
        actors = {role: _actor(role, options, order, say) for role, options in order.services.items()}
        say(RayAnswer(addresses=_addresses(actors, order.start_timeout, say)))
        parent.await_end()
        _stop(actors)
    except Exception as error:  # any error: the parent tells its user
        say(RayAnswer(error=one_line(error)))
    ray.shutdown()
    end_descendants(os.getpid())


def _start_ray(order: RayOrder) -> None:
    """Start Ray on loopback (ray_cluster has set the environment for it) with its files in our folder.

    num_cpus is what Ray schedules by, not what the models use: one for each actor, whose threads are set on purpose by
    the services' own options, and so is the device. The custom resources say which node may hold which actor.
    """
    os.environ[HIDE_DEVICES] = "0"
    os.environ.setdefault(NICENESS, "0")
    ray.init(
        address="local",
        namespace=NAMESPACE,
        num_cpus=len(order.services),
        num_gpus=0,
        resources={_resource(role): 1 for role in order.services},
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=order.directory,
        _node_ip_address=LOOPBACK,
    )
    if (address := ray.util.get_node_ip_address()) != LOOPBACK:
        raise StackError(f"this Ray ({ray.__version__}) listens on {address}, not on loopback: use --no-ray")


def _actor(role: str, options: ModelServiceOptions, order: RayOrder, say: Say) -> Any:
    say(RayAnswer(progress=f"{role}: loading {options.model}"))
    address_file = Path(order.directory) / f"{role}.address"
    actor = ray.remote(ACTORS[kind_of(role)]).options(
        name=role, num_cpus=1, resources={_resource(role): 1}, max_restarts=-1
    )
    return actor.remote(options, address_file)


def _addresses(actors: dict[str, Any], limit: float, say: Say) -> dict[str, str]:
    """Wait for every service; StackError with the first that cannot start."""
    began = time.monotonic()
    roles = {actor.outcome.remote(): role for role, actor in actors.items()}
    addresses: dict[str, str] = {}
    while roles:
        done, _ = ray.wait(list(roles), timeout=max(0.0, limit - (time.monotonic() - began)))
        if not done:
            raise StackError(f"{', '.join(sorted(roles.values()))}: not ready within {limit:.0f} s")
        role = roles.pop(done[0])
        addresses[role] = _address(role, done[0])
        say(RayAnswer(progress=f"{role}: ready after {time.monotonic() - began:.1f} s"))
    return addresses


def _address(role: str, reference: ray.ObjectRef[ThreadOutcome]) -> str:
    try:
        outcome = ray.get(reference)
    except RayActorError as error:
        raise StackError(f"{role}: its process died while starting: {one_line(error)}") from None
    if outcome.error:
        raise StackError(f"{role}: {outcome.error}")
    return outcome.address


def _stop(actors: dict[str, Any]) -> None:
    """Let the services close their links, so that nobody sees a reset connection; ray.shutdown then ends them."""
    with suppress(GetTimeoutError, RayError):
        ray.get([actor.stop.remote() for actor in actors.values()], timeout=STOP_LIMIT)


def _resource(role: str) -> str:
    return f"specwire_{role}"


class Parent:
    """The order to end: stdin's end, whether asked for or because the parent died.

    While Ray starts there is nothing to end in order, so everything is killed at once, this process last.
    """

    def __init__(self) -> None:
        self._serving = threading.Event()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="parent", daemon=True).start()

    def await_end(self) -> None:
        """Everything runs now: wait until the parent wants it to end."""
        self._serving.set()
        self._ended.wait()

    def _watch(self) -> None:
        sys.stdin.read()
        self._ended.set()
        if not self._serving.is_set():
            end_descendants(os.getpid())
            os._exit(1)


class Answers:
    """Our stdout, kept for RayAnswers: Ray itself writes to file descriptor 1, which becomes stderr."""

    def __init__(self) -> None:
        self._stream = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, answer: RayAnswer) -> None:
        self._stream.write(answer.to_json() + "\n")
        self._stream.flush()


if __name__ == "__main__":
    main()
