"""While a command changes a deployment, its autoscaler does not; afterwards another one does."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import ray
from ray.exceptions import RayError

from deploy.cluster.command import DRAIN_MARGIN_S
from deploy.cluster.fleet import AUTOSCALERS, Fleet, kept
from deploy.cluster.registered import listed
from deploy.cluster.schema import ClusterConfig, parse
from deploy.cluster.steering import Look, Orders, Steering, every
from specwire.registry.directory import RegistryUnavailable

# ----------------------------------------------------------------------------------------------------------------------
# The Ray actor that keeps a deployment's pools as large as their load asks: named, detached, one for a deployment.
#
# `specwire deploy` starts it where a pool may have more than one number of replicas. It keeps nothing that matters: one
# that is started again, by Ray or by the next command, goes on from what it finds.

logger = logging.getLogger(__name__)

# Looks that can be asked for: an hour's of one pool.
KEPT_LOOKS = 720


class Autoscaler:
    """See Fleet and Steering. text: the file that was deployed."""

    def __init__(self, text: str, start_timeout: float) -> None:
        self._config = parse(text)
        self._fleet = Fleet(_say, start_timeout, DRAIN_MARGIN_S)
        self._steering = Steering(self._config, start_timeout, DRAIN_MARGIN_S)
        self._every_s = every(self._config)
        self._looking = threading.Lock()
        self._looks: deque[Look] = deque(maxlen=KEPT_LOOKS)
        # A daemon: it holds nothing that has to be put back, and its process ends when the actor is killed.
        threading.Thread(target=self._run, name="autoscaler", daemon=True).start()

    def looks(self) -> list[dict[str, Any]]:
        """What was seen lately, the oldest first; times are Unix times."""
        shift = time.time() - time.monotonic()
        return [asdict(look) | {"at": look.at + shift} for look in list(self._looks)]

    def hold(self) -> None:
        """Do nothing any more: somebody else is about to change what is there."""
        self._looking.acquire()

    def _run(self) -> None:
        while True:
            time.sleep(self._every_s)
            try:
                with self._looking:
                    self._look()
            except (RegistryUnavailable, RayError, ValueError) as error:  # of Ray, too: a name that is taken still
                _say(f"not this time: {error}")
            except Exception:  # a failure of our own: the next look may be better
                logger.exception("a look at the deployment failed")

    def _look(self) -> None:
        places = self._fleet.places()
        entries = asyncio.run(listed(self._config.registry))
        orders = self._steering.look(places, entries, time.monotonic())
        self._looks += orders.looks
        carry_out(self._fleet, self._config, orders)
        for note in orders.notes:
            _say(note)


def carry_out(fleet: Fleet, config: ClusterConfig, orders: Orders) -> None:
    """Nothing is waited for: the next look tells how it went."""
    for name in orders.kill:
        fleet.kill(name)
    for name in orders.start:
        group = config.group(name.group)
        if group is not None:
            fleet.begin(group, name)
    for name in orders.drain:
        fleet.retire(name)


def _say(line: str) -> None:
    """Into the actor's log, which is Ray's."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


BEGIN_LIMIT_S = 30.0


@contextmanager
def changing(fleet: Fleet, start_timeout: float) -> Iterator[None]:
    """Be the only one that does. The next autoscaler goes by the file that is kept then, also after a failure."""
    fleet.take_over()
    try:
        yield
    finally:
        text = kept(start_timeout)
        if text is not None:
            autoscale(text, start_timeout)


def autoscale(text: str, start_timeout: float) -> None:
    """Have the pools of this file scaled, if any is to be."""
    scaled = [group for group in parse(text).groups if group.scales]
    if scaled:
        actor = AUTOSCALERS.begin(Autoscaler, text, start_timeout, runtime_env=scaled[0].runtime_env)
        ray.wait([actor.looks.remote()], timeout=BEGIN_LIMIT_S)  # it outlives this process once it is there
