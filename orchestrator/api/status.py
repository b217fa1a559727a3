"""StatusService: what an orchestrator is doing, for its operators."""

from __future__ import annotations

import asyncio

from orchestrator.options import OrchestratorOptions
from orchestrator.peers.peer import DrafterPeer, VerifierPeer
from orchestrator.pool import Pool
from orchestrator.session.driver import SessionDriver
from orchestrator.sessions import Orchestrator
from specwire.registry.entry import ServiceEntry, ServiceState
from specwire.rpc.channel import host_of, is_loopback
from specwire.rpc.errors import Context
from specwire.rpc.link import Link
from specwire.v1 import status_pb2 as pb
from specwire.v1 import status_pb2_grpc

MOST_SESSIONS = 256
MOST_ORCHESTRATORS = 256
# Characters of a session's id: enough to find it in a log, too few to watch it.
NAME = 8

Peer = VerifierPeer | DrafterPeer


def is_offered(options: OrchestratorOptions) -> bool:
    """Answers operators with a key; without operator keys only where no keys are used, and only on loopback."""
    if options.access.operator_keys is not None:
        return True
    return options.access.keys is None and is_loopback(host_of(options.listen) or "localhost")


class StatusApi(status_pb2_grpc.StatusServiceServicer):
    """Counts its time from its making."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._began = asyncio.get_running_loop().time()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        orchestrator = self._orchestrator
        running = [driver for driver in orchestrator.sessions.values() if driver.view.output.end is None]
        totals = orchestrator.totals.with_running(driver.view.stats for driver in running)
        stats, pool = totals.stats, orchestrator.pool
        now = asyncio.get_running_loop().time()
        return pb.GetStatusResponse(
            uptime_ms=_ms(now - self._began),
            durability=orchestrator.store.durability,
            peers=[
                *(_peer(each, pb.PEER_KIND_VERIFIER) for each in pool.verifiers),
                *(_peer(each, pb.PEER_KIND_DRAFTER) for each in pool.drafters),
                *(_orchestrator(each) for each in _registered(pool)),
            ],
            sessions_running=len(running),
            sessions=[_session(driver, now) for driver in running[:MOST_SESSIONS]],
            sessions_finished=totals.reasons.total(),
            tokens=stats.outcomes.total(),
            proposed=stats.shown.proposed,
            tested=stats.shown.tested,
            accepted=stats.shown.accepted,
            target_forwards=stats.target_forwards,
            forwards_saved=stats.forwards_saved,
            log_trouble=orchestrator.log.trouble,
            log_trouble_ms=_ms(orchestrator.log.trouble_s),
        )


def _peer(peer: Peer, kind: pb.PeerKind) -> pb.PeerStatus:
    link = peer.link if isinstance(peer.link, Link) else None
    return pb.PeerStatus(
        kind=kind,
        address=peer.link.address,
        model=peer.info.model if peer.info is not None else "",
        state=_state(peer),
        trouble=peer.refusal or (link.trouble if link is not None and not link.up else "") or "",
        sessions=len(peer.subjects),
        slots=peer.info.slots if peer.info is not None else 0,
        round_trip_us=round(link.round_trip_us) if link is not None else 0,
        region=peer.info.region if peer.info is not None else "",
        others_sessions=peer.report.others,
    )


def _registered(pool: Pool) -> list[ServiceEntry]:
    """Registered orchestrators, this one included."""
    found = pool.feed.orchestrators if pool.feed is not None else ()
    return sorted(found, key=lambda each: each.address)[:MOST_ORCHESTRATORS]


def _orchestrator(entry: ServiceEntry) -> pb.PeerStatus:
    draining = entry.state is ServiceState.DRAINING
    return pb.PeerStatus(
        kind=pb.PEER_KIND_ORCHESTRATOR,
        address=entry.address,
        model=", ".join(model.name for model in entry.models),
        state=pb.PEER_STATE_DRAINING if draining else pb.PEER_STATE_UP,
        sessions=entry.load.running + entry.load.waiting,
        region=entry.region,
    )


def _state(peer: Peer) -> pb.PeerState:
    if not peer.link.up:
        return pb.PEER_STATE_DOWN
    if peer.refusal is not None:
        return pb.PEER_STATE_REFUSED
    draining = peer.report.draining or (isinstance(peer, VerifierPeer) and peer.draining)
    return pb.PEER_STATE_DRAINING if draining else pb.PEER_STATE_UP


def _session(driver: SessionDriver, now: float) -> pb.SessionStatus:
    view, stats = driver.view, driver.view.stats
    return pb.SessionStatus(
        name=view.record.session_id[:NAME],
        tenant=view.record.tenant,
        state=driver.session.state.value,
        age_ms=_ms(now - stats.started),
        prompt_tokens=len(view.record.prompt),
        tokens=len(view.output.tokens),
        writing_ms=_ms(now - stats.first_token) if stats.first_token is not None else 0,
        proposed=stats.shown.proposed,
        tested=stats.shown.tested,
        accepted=stats.shown.accepted,
        plan=stats.plan,
    )


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
