"""Whether a target and its drafters have the same ids, and whether they fit into memory. No weights are loaded.

Imports torch and transformers, unlike the other checks: `specwire doctor` must run where these are missing.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from deploy.cli.diagnosis.checks import Finding, bad, ok, warn
from specwire.core.model import AUTO, AUTO_KV, INT8_DYNAMIC, LLAMACPP, OPENVINO, TORCH, ModelError, is_gguf
from specwire.lm import Feed, LanguageModel, load_model
from specwire.lm.gguf_file import read_gguf
from specwire.lm.gguf_tokenizer import text_of
from specwire.lm.kv_cache import position_bytes, readable
from specwire.lm.load import native_dtype, native_precision
from specwire.lm.pretrained import outline
from specwire.lm.runners.hybrid import slot_state_bytes
from specwire.lm.scripted import PREFIX, ScriptedLM
from specwire.named_models import check_directory, located
from specwire.text.tokenizer import TokenizerError, vocabulary_fingerprint
from specwire.text.vocabulary_map import TokenTable, VocabularyMap

# Rows of the forwards that `--measure` times, positions before them, and how often.
MEASURED_ROWS, MEASURED_BEHIND, MEASURED_ROUNDS = (1, 4, 8), 128, 5
# Share of the available memory that weights and caches may take: forwards need some, too.
SHARE = 0.9
# Share of a text that a drafter of another vocabulary should have tokens for.
MUCH_SHARED = 0.5


@dataclass(frozen=True, slots=True)
class Facts:
    """kv_bytes: of one slot; `state_bytes` of them are states of recurrent layers.

    weight_bytes: in the asked dtype; None where the files are not here.
    tokenizer_json: empty where the model has none.
    """

    model: str
    vocabulary: str
    ids: int
    context: int
    kv_bytes: int
    weight_bytes: int | None
    tokenizer_json: bytes = b""
    state_bytes: int = 0


def check_devices() -> Iterator[Finding]:
    devices = [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if devices:
        yield ok("devices", ", ".join(devices))
    elif torch.version.cuda and Path("/proc/driver/nvidia").exists():
        yield warn("devices", "cpu only, though this machine has an NVIDIA driver", "look at nvidia-smi")
    else:
        yield ok("devices", "cpu")


def check_choices() -> Iterator[Finding]:
    """What `--dtype auto` and `--runtime auto` mean on this machine, and why; whether int8-dynamic is computed here."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    precision = native_precision(device)
    yield ok("dtype", f"auto is {precision.dtype}: {precision.reason}")
    if device != "cpu":
        yield ok("runtime", f"auto is torch on {device}: openvino computes on processors")
        return
    if importlib.util.find_spec("openvino") is None:
        yield ok("runtime", "auto is torch: openvino is not installed")
        return
    from specwire.lm.runners.openvino.graph import computed_in
    from specwire.lm.runners.openvino.runner import rounds_activations

    computed = str(computed_in(getattr(torch, precision.dtype))).removeprefix("torch.")
    kept = f"keys and values in {computed}, which it computes in here"
    why = "as it is installed and the quicker one"
    yield ok("runtime", f"auto is openvino for the Llama family, {why}, {kept}; torch for others")
    refused = "is refused here: openvino needs VNNI instructions for it"
    yield ok("int8", f"{INT8_DYNAMIC} {'multiplies integers on openvino' if rounds_activations() else refused}")


def check_models(
    target: str | None, drafts: list[str], dtype: str, slots: int, available: int | None
) -> Iterator[Finding]:
    """available: bytes of memory, None where nobody knows."""
    known: dict[str, Facts] = {}
    for model in dict.fromkeys([*([target] if target else []), *drafts]):
        try:
            known[model] = facts_of(model, dtype)
        except Exception as error:  # any error that the library raises for a broken directory or an unreachable hub
            reason = str(error).strip().partition("\n")[0]
            yield bad("model", f"{model} cannot be read: {reason}", "give a directory, a hub id or a GGUF file")
    if any(is_gguf(located(model)) for model in known):
        yield _check_llamacpp()
    if target in known:
        for draft in (each for each in drafts if each in known):
            yield _check_pair(known[target], known[draft])
    for facts in known.values():
        yield _describe(facts, slots)
    yield from _check_fit(list(known.values()), slots, available)


def measure(model: str, dtype: str) -> Iterator[Finding]:
    """V(1), V(4) and V(8) of each runtime that computes the model, by as many threads as PyTorch takes."""
    for runtime in (OPENVINO, LLAMACPP, TORCH):
        try:
            lm = load_model(model, slots=1, dtype=dtype, runtime=runtime, threads=torch.get_num_threads())
        except ModelError as error:
            yield ok("speed", f"{runtime}: {error}")
        else:
            times = _seconds_by_rows(lm).items()
            told = ", ".join(f"V({rows}) {1000 * seconds:.1f} ms" for rows, seconds in times)
            bits = "guesses change no bit" if lm.info.deterministic else "guesses may tip near-ties"
            yield ok("speed", f"{runtime}: {told}; {bits}")


def _seconds_by_rows(lm: LanguageModel) -> dict[int, float]:
    """The quickest of several forwards behind a text: other work of the machine can only add time."""
    ids = [(7 * at + 3) % lm.info.vocabulary for at in range(min(MEASURED_BEHIND, lm.info.context // 2) + 8)]
    behind, found = len(ids) - 8, dict.fromkeys(MEASURED_ROWS, math.inf)
    lm.forward([Feed(0, 0, ids[:behind], 1)])
    for rows in sorted(MEASURED_ROWS * MEASURED_ROUNDS):  # a change of shape takes time of its own
        began = time.perf_counter()
        lm.forward([Feed(0, behind, ids[behind : behind + rows], rows)])
        found[rows] = min(found[rows], time.perf_counter() - began)
        lm.rollback(0, behind)
    return found


def facts_of(model: str, dtype: str) -> Facts:
    """Raises ModelError for everything that `verify` and `draft` refuse before they load the weights."""
    if model.startswith(PREFIX):
        info = ScriptedLM.parse(model, slots=1).info
        return Facts(model, info.vocabulary_fingerprint, info.vocabulary, info.context, 0, 0, info.tokenizer_json)
    if is_gguf(located(model)):
        file = read_gguf(located(model))
        found, context = text_of(file), file.context(None)
        kept = int(context * file.position_bytes(file.kv_type(AUTO_KV)))
        size = file.path.stat().st_size
        ids = len(found.tokens)
        return Facts(model, vocabulary_fingerprint(found.tokens), ids, context, kept, size, found.tokenizer_json)
    check_directory(model)
    known = outline(model)
    config, precision = known.config, getattr(torch, native_dtype() if dtype == AUTO else dtype)
    tokens = known.text.vocabulary(config.get_text_config().vocab_size)
    states, weights = slot_state_bytes(config, precision), _weight_bytes(known.location, config, precision)
    kv, text = known.context * position_bytes(config, precision) + states, known.text.tokenizer_json
    return Facts(model, vocabulary_fingerprint(tokens), len(tokens), known.context, kv, weights, text, states)


def _check_llamacpp() -> Finding:
    """Loads its library, which may be another one than it came with."""
    from specwire.lm.runners.llamacpp.runner import library

    try:
        loaded = library().functions
    except ModelError as error:
        return bad("llamacpp", f"no GGUF file is served: {error}", "pip install 'specwire[llamacpp]'")
    where = "layers may lie on a GPU (--gpu-layers)" if loaded.llama_supports_gpu_offload() else "built for CPUs only"
    return ok("llamacpp", f"llama_cpp {version('llama-cpp-python')}, {where}")


def _weight_bytes(path: str, config: object, dtype: torch.dtype) -> int | None:
    """Bytes of weights in `dtype`, from the files' size and the configuration's dtype."""
    files = list(Path(path).glob("*.safetensors")) if Path(path).is_dir() else []
    stored = getattr(config, "dtype", None)
    width = stored.itemsize if isinstance(stored, torch.dtype) else 4
    return sum(file.stat().st_size for file in files) * dtype.itemsize // width if files else None


def _check_pair(target: Facts, draft: Facts) -> Finding:
    if target.vocabulary == draft.vocabulary:
        return ok("pair", f"{draft.model} and {target.model} have the same {target.ids} tokens")
    text = f"{draft.model} has {draft.ids} tokens, {target.model} {target.ids}, and they are not the same"
    same = "choose a draft model with the target's tokenizer, of the same family"
    try:
        theirs, own = (TokenTable(each.tokenizer_json, each.ids, ()) for each in (target, draft))
        found = VocabularyMap(theirs, own)
    except TokenizerError as error:
        return bad("pair", f"{text}: {error}", same)
    told = f"{text}; {found}"
    return ok("pair", told) if found.share >= MUCH_SHARED else warn("pair", told, f"to guess more: {same}")


def _describe(facts: Facts, slots: int) -> Finding:
    weights = "" if facts.weight_bytes is None else f", weights {readable(facts.weight_bytes)}"
    cache = f"{slots} sessions of {facts.context} tokens {readable(slots * facts.kv_bytes)}"
    if facts.state_bytes:
        cache += f", in each {readable(facts.state_bytes)} for states of recurrent layers"
    return ok("model", f"{facts.model}: {facts.ids} tokens{weights}, {cache}")


def _check_fit(known: list[Facts], slots: int, available: int | None) -> Iterator[Finding]:
    if available is None or not known:
        return
    needed = sum(slots * each.kv_bytes + (each.weight_bytes or 0) for each in known)
    if needed <= SHARE * available:
        yield ok("memory", f"{readable(needed)} of {readable(available)} needed for models and caches")
        return
    caches = sum(each.kv_bytes for each in known)
    room = SHARE * available - sum(each.weight_bytes or 0 for each in known)
    told = f"{readable(needed)} needed for models and {slots} full contexts, {readable(available)} available"
    if caches and room >= caches:  # caches take memory as texts grow
        yield warn("memory", told, f"--slots {int(room // caches)}, if texts will be as long as that")
    else:
        yield bad("memory", told, "a shorter --context, or smaller models")
