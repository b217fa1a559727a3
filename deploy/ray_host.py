"""The process that holds the local Ray: starts it, the verifier's and the drafter's actors, and waits for stdin's end.

``python -m deploy.ray_host ORDER`` with RayOrder as JSON; RayAnswer lines on stdout.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from specwire.rpc.process import ModelServiceOptions, one_line

from deploy.processes import end_descendants
from deploy.ray_actors import ACTORS
from deploy.ray_messages import RayAnswer, RayOrder
from deploy.service_thread import Outcome

NAMESPACE = "specwire"
OBJECT_STORE_BYTES = 80 << 20  # Ray's least is 75 MiB; no token travels through it
STOP_LIMIT = 2.0


def main() -> None:
    order = RayOrder.from_json(sys.argv[1])
    try:
        _start_ray(order)
        actors = {role: _actor(role, options, order) for role, options in order.services.items()}
        answer = _await_services(actors, order)
    except RayError as error:
        answer = RayAnswer(error=f"Ray did not start: {one_line(error)}")
    _say(answer)
    if not answer.error:
        sys.stdin.read()  # until the parent closes it
        _stop_services(actors)
    ray.shutdown()
    end_descendants(os.getpid())


def _start_ray(order: RayOrder) -> None:
    """Start Ray on loopback with its files in our folder.

    num_cpus is what Ray schedules by, not what the models use: one for each actor, whose threads are set on purpose by
    the services' own options. The custom resources say which node may hold which actor.
    """
    ray.init(
        address="local",
        namespace=NAMESPACE,
        num_cpus=len(order.services),
        num_gpus=0,
        resources={_resource(role): 1 for role in order.services},
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=order.directory,
    )


def _actor(role: str, options: ModelServiceOptions, order: RayOrder) -> ActorHandle[Outcome]:
    _say(RayAnswer(progress=f"{role}: loading {options.model}"))
    address_file = Path(order.directory) / f"{role}.address"
    return (
        ray.remote(ACTORS[role])
        .options(name=role, num_cpus=1, resources={_resource(role): 1}, max_restarts=-1)
        .remote(options, address_file)
    )


def _await_services(actors: dict[str, ActorHandle[Outcome]], order: RayOrder) -> RayAnswer:
    """Return all addresses, or the first error."""
    began = time.monotonic()
    roles = {actor.outcome.remote(): role for role, actor in actors.items()}
    addresses: dict[str, str] = {}
    while roles:
        done, _ = ray.wait(list(roles), timeout=order.start_timeout - (time.monotonic() - began))
        if not done:
            waiting = ", ".join(sorted(roles.values()))
            return RayAnswer(error=f"{waiting}: not ready within {order.start_timeout:.0f} s")
        role = roles.pop(done[0])
        outcome = _outcome(done[0])
        if outcome.error:
            return RayAnswer(error=f"{role}: {outcome.error}")
        addresses[role] = outcome.address
        _say(RayAnswer(progress=f"{role}: ready after {time.monotonic() - began:.1f} s"))
    return RayAnswer(addresses=addresses)


def _outcome(reference: ray.ObjectRef[Outcome]) -> Outcome:
    try:
        return ray.get(reference, timeout=STOP_LIMIT)
    except RayActorError as error:
        return Outcome(error=f"its process died while starting: {one_line(error)}")


def _stop_services(actors: dict[str, ActorHandle[Outcome]]) -> None:
    """Let the services close their links, so that nobody sees a reset connection."""
    stops = [actor.stop.remote() for actor in actors.values()]
    try:
        ray.get(stops, timeout=STOP_LIMIT)
    except (GetTimeoutError, RayError):
        return  # ray.shutdown ends them


def _resource(role: str) -> str:
    return f"specwire_{role}"


def _say(answer: RayAnswer) -> None:
    sys.stdout.write(answer.to_json() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
