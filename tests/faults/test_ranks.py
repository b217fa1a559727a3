"""A verifier that is split over processes loses one of them: its sessions go on at another verifier."""

from __future__ import annotations

import os
import signal

import pytest

from demo_pair import TARGET
from deploy.stack.processes import descendants
from tests.faults.parts import parts
from tests.faults.scene import Asked
from tests.faults.stack import read_log
from tests.faults.streams import PROMPT, Stream
from tests.faults.test_demo_pair import check_choices
from tests.orchestrator.redis_for_tests import RedisServer

LENGTH = 800
WORDS = (str(TARGET), "--dtype", "float32", "--threads", "1", "--slots", "4", "--context", "1024")


@pytest.mark.whole_matrix
def test_sessions_move_from_a_split_verifier_that_lost_a_rank_to_a_whole_one() -> None:
    """Of three sessions at two verifiers at least one is at each."""
    with RedisServer() as redis, parts() as owned:
        split = owned.start("verify", *WORDS, "--tensor-parallel-size", "2")
        whole = owned.start("verify", *WORDS)
        named = [word for service in (split, whole) for word in ("--verifier", service.ready())]
        front = owned.start("orchestrate", *named, "--redis-url", redis.url)
        front.ready()
        (rank,) = descendants(split.process.pid)
        streams = [Stream(front.address, PROMPT, max_tokens=LENGTH) for _ in range(3)]
        for stream in streams:
            stream.until(1)
        os.kill(rank, signal.SIGKILL)
        under_way = [read_log(redis.url, stream.session_id) for stream in streams]
        assert max(len(log.tokens) for log in under_way if log is not None) < LENGTH
        assert split.wait() == 1
        assert "rank 1 of 2 ended by SIGKILL" in split.said()
        for stream in streams:
            stream.rest()
            assert stream.error is None
            assert len(stream.tokens) == LENGTH
            check_choices(Asked(PROMPT), stream.tokens)
