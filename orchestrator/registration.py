"""What an orchestrator says of itself in the registry."""

from __future__ import annotations

import time

from orchestrator.sessions import Orchestrator
from orchestrator.target import Target
from specwire.registry.entry import MOST_MODELS, Load, Role, ServedModel, ServiceEntry
from specwire.registry.options import register
from specwire.registry.registrar import Registrar, new_id


def registered(orchestrator: Orchestrator, address: str) -> Registrar:
    """It answers at `address`. The caller closes what this returns."""
    entry_id, started, registration = new_id(), time.time(), orchestrator.options.registration

    def describe(at: str) -> ServiceEntry:
        models = _models(orchestrator)
        return ServiceEntry(
            entry_id,
            Role.ORCHESTRATOR,
            at,
            region=registration.region,
            models=models,
            load=_load(orchestrator),
            started=started,
        )

    return register(registration, address, describe)


def _models(orchestrator: Orchestrator) -> tuple[ServedModel, ...]:
    return tuple(_model(target) for target in orchestrator.pool.targets()[:MOST_MODELS])


def _model(target: Target) -> ServedModel:
    info, digest = target.info, target.identity.digest
    return ServedModel(info.model, info.weights_fingerprint, info.vocabulary_fingerprint, digest)


def _load(orchestrator: Orchestrator) -> Load:
    """Sessions that are driven here; those without a verifier wait."""
    driven = [each for each in orchestrator.sessions.values() if each.output.end is None and not each.following]
    waiting = sum(each.verifying.peer is None for each in driven)
    return Load(len(driven) - waiting, waiting, 0)
