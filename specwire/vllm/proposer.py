"""The class that vLLM is told to load: `--speculative-config '{"method": "custom_class", ...}'`."""

from __future__ import annotations

import argparse
import asyncio
import atexit
import logging
import os
import shlex
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from specwire.core.invalid import InvalidParameter
from specwire.core.messages import parse_plan
from specwire.core.model import ModelError
from specwire.lm.runners.vllm import check_version, device_name, tested
from specwire.options import add_options
from specwire.rpc.channel import check_token_is_safe
from specwire.rpc.keys import read_peer_token, read_token
from specwire.rpc.server_options import check_listen
from specwire.rpc.tls import client_tls
from specwire.text.tokenizer import vocabulary_fingerprint, vocabulary_map
from specwire.vllm.drafting import Drafting, DraftingOptions, VllmRow, VllmTarget

logger = logging.getLogger("vllm.specwire")  # below vLLM's own logger, which has handlers

# The environment variable with the options: vLLM hands nothing else to the class.
VARIABLE = "SPECWIRE_PROPOSER"
# A step waits so long for what is at hand, and then goes on without: longer only if our thread hangs.
MOST_WAIT_S = 0.02
# Between two looks for requests that have ended.
SWEEP_S = 0.5
STOP_S = 2.0


class _VariableParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidParameter(VARIABLE, message)


def options_of(environment: Mapping[str, str]) -> DraftingOptions:
    """What SPECWIRE_PROPOSER says: options, as on a command line. Raises InvalidParameter."""
    parser = _VariableParser(prog=VARIABLE, add_help=False)
    add_options(parser, "proposer")
    args = parser.parse_args(shlex.split(environment.get(VARIABLE, "")))
    for address in args.drafter:
        check_listen(address, f"{VARIABLE}: drafter")
    parse_plan(args.plan)
    tls, token = client_tls(args), read_peer_token(args) or read_token(args, environment)
    for address in args.drafter:
        check_token_is_safe(address, tls, token)
    return DraftingOptions(args.plan, not args.no_ngram, tuple(args.drafter), args.registry, tls, token)


# ----------------------------------------------------------------------------------------------------------------------
# What is read of vLLM: its configuration, its ranks.

TOKENIZER = "tokenizer.json"


class UnknownEngine(RuntimeError):
    """A vLLM that was not tested, or that lacks what is needed of it."""


def describe(vllm_config: Any) -> VllmTarget:
    """Read a VllmConfig.

    Raises:
        UnknownEngine: says what is missing, and which versions were tested.
    """
    try:
        check_version()
        model, speculative = vllm_config.model_config, vllm_config.speculative_config
        width = int(model.get_vocab_size())
        tokens = {at: token for at, token in vocabulary_map(_tokenizer(model), width).items() if at < width}
        return VllmTarget(
            Path(str(model.model)).name,
            min(max(tokens) + 1, width),
            vocabulary_fingerprint(tokens),
            int(model.max_model_len),
            int(speculative.num_speculative_tokens),
            _leads(vllm_config.parallel_config),
            device_name(str(vllm_config.device_config.device_type)),
        )
    except ModelError as error:
        raise UnknownEngine(f"specwire.vllm: {error}") from error
    except (AttributeError, ImportError, ValueError) as error:
        raise UnknownEngine(f"specwire.vllm needs of vLLM what this one lacks: {error}; {tested()}") from error


def _tokenizer(model: Any) -> bytes:
    """The tokenizer's JSON; empty where vLLM was started without one."""
    if model.skip_tokenizer_init:
        return b""
    file = Path(str(model.tokenizer)) / TOKENIZER
    if file.is_file():
        return file.read_bytes()
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(model.tokenizer, revision=model.tokenizer_revision)
    text: str = loaded.backend_tokenizer.to_str()
    return text.encode()


def _leads(parallel: Any) -> bool:
    """Every tensor-parallel rank has a proposer; the scheduler takes what the first one proposes."""
    if parallel.tensor_parallel_size == 1:
        return True
    from vllm.distributed import get_tensor_model_parallel_rank

    return bool(get_tensor_model_parallel_rank() == 0)


# ----------------------------------------------------------------------------------------------------------------------
# What vLLM calls.


class Proposer:
    """Proposes to vLLM what drafters elsewhere guess, and what the texts themselves suggest.

    It never waits for a drafter: a step gets what has come. Nothing that goes wrong here ends a request; the worst is
    that nothing is proposed. vLLM's own test decides what becomes of a proposal.

    Args:
        vllm_config: vLLM's VllmConfig.

    Raises:
        InvalidParameter: the environment names what cannot be. UnknownEngine: not a vLLM that is known.
    """

    def __init__(self, vllm_config: Any) -> None:
        engine = describe(vllm_config)
        self._thread = ProposerThread(engine, options_of(os.environ)) if engine.leads else None

    def load_model(self, target: Any) -> None:
        """Load nothing; vLLM's CPU runner asks for it."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft tokens to test in the next step, of each request of the batch; none where nothing is at hand.

        Args:
            sampled_token_ids: what the last step decided of each; none while a prompt is being fed.
            num_tokens_no_spec: int array (requests,), lengths of the texts, with what was decided.
            token_ids_cpu: int array (requests, context), the texts.
            slot_mappings: not used.
        """
        if self._thread is None or self._thread.silent:
            return [[] for _ in sampled_token_ids]
        rows = [
            VllmRow(token_ids_cpu[at], int(num_tokens_no_spec[at]), tuple(map(int, decided)))
            for at, decided in enumerate(sampled_token_ids)
        ]
        return self._thread.propose(rows)


class ProposerThread:
    """Owns the thread with the event loop in which everything of ours happens."""

    def __init__(self, engine: VllmTarget, options: DraftingOptions) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="specwire", daemon=True)
        self._broken = False
        self._noted: Future[None] = Future()  # of the last step that did not wait
        self._noted.set_result(None)
        self._thread.start()
        atexit.register(self.stop)
        self._drafting = self._ask(_begun(engine, options)).result(STOP_S)
        self._sweeping = self._ask(self._sweep())
        logger.info(
            "specwire: up to %d draft tokens a step; drafters: %s; n-grams: %s",
            engine.most,
            ", ".join(options.drafters) or options.registry or "none",
            "on" if options.ngram else "off",
        )

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _ask(self, what: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(what, self._loop)

    @property
    def silent(self) -> bool:
        """Whether nothing can be proposed: then a step costs nothing here."""
        return self._broken or self._drafting.idle

    def propose(self, rows: Sequence[VllmRow]) -> list[list[int]]:
        """As `Proposer.propose`. Never raises."""
        if self.silent:
            return [[] for _ in rows]
        if self._noted.done() and self._drafting.nothing_offered:
            # vLLM writes on in its rows meanwhile.
            kept = [row._replace(ids=row.ids[: row.length].copy()) for row in rows]
            self._noted = Future()
            self._loop.call_soon_threadsafe(self._note, kept, time.monotonic(), self._noted)
            return [[] for _ in rows]
        answer: Future[list[list[int]]] = Future()
        self._loop.call_soon_threadsafe(self._step, rows, answer)
        with suppress(FutureTimeout):
            return answer.result(MOST_WAIT_S)
        return [[] for _ in rows]

    def _step(self, rows: Sequence[VllmRow], answer: Future[list[list[int]]]) -> None:
        with self._safely():
            answer.set_result(self._drafting.step(rows))
            self._drafting.settle()
        if not answer.done():
            answer.set_result([[] for _ in rows])

    def _note(self, rows: Sequence[VllmRow], ended_s: float, noted: Future[None]) -> None:
        with self._safely():
            self._drafting.note(rows, ended_s)
            self._drafting.settle()
        noted.set_result(None)

    @contextmanager
    def _safely(self) -> Iterator[None]:
        """End proposing, and nothing else, where something of ours fails."""
        try:
            yield
        except Exception:
            logger.exception("specwire: proposing failed, and is off from now on")
            self._broken = True
            self._drafting.leave()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                self._drafting.sweep()
            except Exception:
                logger.exception("specwire: a look for ended requests failed")

    def stop(self) -> None:
        """End the links and the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        with suppress(Exception):  # at the process's end: what is left ends with it
            self._sweeping.cancel()
            self._ask(self._drafting.stop()).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)


async def _begun(engine: VllmTarget, options: DraftingOptions) -> Drafting:
    drafting = Drafting(engine, options)
    drafting.start()
    return drafting
