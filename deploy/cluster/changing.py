"""While a command changes a deployment, its autoscaler does not; afterwards another one does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray

from deploy.cluster.autoscaler import Autoscaler
from deploy.cluster.fleet import AUTOSCALERS, Fleet, kept
from deploy.cluster.schema import parse

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
