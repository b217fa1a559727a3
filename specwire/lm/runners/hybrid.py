"""Models with recurrent layers, by their own modules: rollback by index there, too.

A recurrent layer has no earlier position to go back to. So its state (the convolution's last inputs, and what its scan
carries on) is kept after each of the last rows of a feed, and a rollback picks one. Of the rows before, a few states
stay, spread over the text: a rollback to a position between them feeds the tokens from the nearest one on again.

Convolutions take all rows at once. Scans give the state behind their last row only, so within a window they are run
here, by the same recurrence with all states; all else, most of a forward, is batched as ever. Padding changes no state.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu, softplus
from transformers import PreTrainedModel

from specwire.core.messages import MOST_WINDOW
from specwire.core.model import Feed
from specwire.lm.kv_cache import LineRunner
from specwire.lm.runners.hugging_face import MOST_TOGETHER, PaddedBatch, SlotCache

# Rows of a feed whose states are kept: a window and the token before it. States of a slot: those, the one that the feed
# began with, the empty one, and a few of the text before.
ROWS, SPREAD = MOST_WINDOW + 1, 5
STATES = ROWS + 2 + SPREAD
# Tokens that are fed again in one forward.
MOST_AGAIN = 512
# Rows of a scan that are computed at once.
BLOCK = 32


class KeptStates:
    """Which states of one slot are kept: by how many tokens they stand behind, their place. The empty one is at 0.

    tokens: that the slot was fed.
    """

    def __init__(self, states: int = STATES) -> None:
        self.tokens: list[int] = []
        self.places = {0: 0}
        self._free = list(range(states - 1, 0, -1))

    def nearest(self, position: int) -> int:
        """The last position with a state, up to this one."""
        return max(each for each in self.places if each <= position)

    def feed(self, start: int, tokens: Sequence[int]) -> list[int]:
        """Take tokens behind the state at `start`; the columns (indices into them) whose states are kept from now on.

        Those behind `start` are void. The places of the oldest are used again, where states stand closest.
        """
        self.cut(start)
        self.tokens += tokens
        columns = list(range(max(0, len(tokens) - ROWS), len(tokens)))
        while len(self._free) < len(columns):
            self._drop(self._crowded(start))
        for column in columns:
            self.places[start + column + 1] = self._free.pop()
        return columns

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        self.void(length)

    def void(self, length: int) -> None:
        """Of positions behind `length` no state is kept."""
        for position in [each for each in self.places if each > length]:
            self._drop(position)

    def copied(self, length: int) -> KeptStates:
        """The same places of another slot."""
        other = KeptStates(len(self.places) + len(self._free))
        other.tokens, other.places, other._free = list(self.tokens), dict(self.places), list(self._free)
        other.cut(length)
        return other

    def _drop(self, position: int) -> None:
        self._free.append(self.places.pop(position))

    def _crowded(self, start: int) -> int:
        """The one between 0 and `start` that is missed least: its neighbours stand closest."""
        held = sorted(self.places)
        inner = [at for at, position in enumerate(held) if 0 < position < start]
        return held[min(inner, key=lambda at: held[at + 1] - held[at - 1])]


class Kept(NamedTuple):
    """Index tensors of the states of one forward.

    begin: (B,) places of the states that feeds begin with. padding: (B,) columns. row, column, slot, place: of each
    state that is kept.
    """

    begin: torch.Tensor
    padding: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    slot: torch.Tensor
    place: torch.Tensor


class HybridCache(SlotCache):
    """Beside keys and values: by layer the convolution's tails and the scan's states, (slots, states, ...)."""

    def __init__(self, slots: int, context: int) -> None:
        super().__init__(slots, context)
        self.slots = [KeptStates() for _ in range(slots)]
        self._kept: Kept | None = None
        self._tails: dict[int, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}

    def begin(self, feeds: Sequence[Feed], batch: PaddedBatch) -> None:
        width, device = batch.tokens.shape[1], batch.tokens.device
        begin, kept, paddings = [], [], [width - len(feed.tokens) for feed in feeds]
        for row, feed in enumerate(feeds):
            own, padding = self.slots[feed.slot], width - len(feed.tokens)
            begin.append(own.places[feed.start])
            columns = own.feed(feed.start, feed.tokens)
            kept += [(row, padding + at, feed.slot, own.places[feed.start + at + 1]) for at in columns]
        indices = torch.tensor(kept, device=device).unbind(1)
        self._kept = Kept(torch.tensor(begin, device=device), torch.tensor(paddings, device=device), *indices)
        self.batch = batch

    def end(self) -> None:
        self.batch = self._kept = None

    # What the models' modules ask.

    def is_recording_past(self, layer_idx: int) -> bool:
        """Then single rows go the way of several."""
        return True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_options: Any
    ) -> torch.Tensor:
        """Its scan has filed it."""
        return recurrent_states

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_options: Any,
    ) -> torch.Tensor:
        """(B, channels, M) in; with the tails before it, (B, channels, kernel + M), out."""
        size = conv_kernel_size or conv_states.shape[-1]
        kept, batch = self._under_way()
        if layer_idx not in self._tails:
            self._tails[layer_idx] = conv_states.new_zeros(*self._room, conv_states.shape[1], size)
        store = self._tails[layer_idx]
        tails = store[batch.slots, kept.begin]
        full = torch.cat((tails, conv_states), dim=-1)
        for row, padding in enumerate(kept.padding.tolist()):
            if padding:  # the tail stands before the first token, not before the padding
                full[row, :, padding : padding + size] = tails[row]
        store[kept.slot, kept.place] = full.unfold(2, size, 1)[kept.row, :, kept.column + 1]
        return full

    # What scans ask.

    def states_before(self, layer: int, shape: Sequence[int]) -> torch.Tensor:
        """(B, *shape) float32."""
        kept, batch = self._under_way()
        if layer not in self._states:
            self._states[layer] = torch.zeros(*self._room, *shape, device=batch.slots.device)
        return self._states[layer][batch.slots, kept.begin]

    def file_states(self, layer: int, states: torch.Tensor, first: int) -> None:
        """(B, columns, ...) from column `first` on."""
        kept, _ = self._under_way()
        inside = (kept.column >= first) & (kept.column < first + states.shape[1])
        found = states[kept.row[inside], kept.column[inside] - first]
        self._states[layer][kept.slot[inside], kept.place[inside]] = found

    def padding(self) -> torch.Tensor | None:
        """(B,); None where there is none."""
        kept, batch = self._under_way()
        return kept.padding if len(batch.slots) > 1 and bool(kept.padding.any()) else None

    def _under_way(self) -> tuple[Kept, PaddedBatch]:
        if self._kept is None or self.batch is None:
            raise RuntimeError("the cache was used outside a forward")
        return self._kept, self.batch

    @property
    def _room(self) -> tuple[int, int]:
        return self._size[0], STATES

    def zero(self, slot: int, stop: int) -> None:
        super().zero(slot, stop)
        self.slots[slot] = KeptStates()
        for store in (*self._tails.values(), *self._states.values()):
            store[slot].zero_()

    def copy(self, source: int, target: int, stop: int) -> None:
        super().copy(source, target, stop)
        self.slots[target] = self.slots[source].copied(stop)
        for store in (*self._tails.values(), *self._states.values()):
            store[target].copy_(store[source])

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.state_bytes

    @property
    def state_bytes(self) -> int:
        return sum(store.nbytes for store in (*self._tails.values(), *self._states.values()))


class Scan(ABC):
    """Stands in a mixer for its scan: the same recurrence, of which it files the states that are kept.

    Outside of a forward of ours it is the mixer's own.
    """

    def __init__(self, cache: HybridCache, layer: int, own: Callable[..., Any], single: Callable[..., Any]) -> None:
        """own: the module's scan. single: its scan for single rows, where it is asked for that."""
        self._cache, self._layer, self._own, self._single = cache, layer, own, single

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._own(*args, **options) if self._cache.batch is None else self.scan(*args, **options)

    @abstractmethod
    def scan(self, *args: Any, **options: Any) -> Any:
        """As the mixer's own scan is called."""

    def begin(self, shape: Sequence[int]) -> torch.Tensor:
        self._padding = self._cache.padding()
        return self._cache.states_before(self._layer, shape)

    def file(self, states: torch.Tensor, first: int) -> None:
        self._cache.file_states(self._layer, states, first)

    def unless_padded(self, column: int, state: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Padding leaves the state as it was."""
        if self._padding is None:
            return state
        real = (self._padding <= column).view(-1, *[1] * (state.dim() - 1))
        return torch.where(real, state, before)

    def along(self, state: torch.Tensor, decay: torch.Tensor, gain: torch.Tensor, first: int) -> torch.Tensor:
        """h_t = decay_t h_(t-1) + gain_t: all of them, (B, columns, ...), filed."""
        states = []
        for at in range(gain.shape[1]):
            state = self.unless_padded(first + at, torch.addcmul(gain[:, at], state, decay[:, at]), state)
            states.append(state)
        all_states = torch.stack(states, dim=1)
        self.file(all_states, first)
        return all_states


class SelectiveScan(Scan):
    """Mamba's (arXiv 2312.00752, algorithm 2): h_t = exp(dt_t A) h_(t-1) + dt_t B_t x_t, y_t = C_t h_t + D x_t."""

    def scan(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor,
        z: torch.Tensor,
        delta_bias: torch.Tensor | None = None,
        **_options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Channels first: hidden_states, dt, z (batch, channels, M), B, C (batch, size, M), A (channels, size)."""
        dt = softplus(dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None])
        state, outputs = self.begin(A.shape), []
        for first in range(0, dt.shape[-1], BLOCK):
            x, step, b, c = (each[..., first : first + BLOCK].transpose(1, 2) for each in (hidden_states, dt, B, C))
            decay = torch.exp(A * step[..., None])
            gain = step[..., None] * b[:, :, None, :].float() * x[..., None].float()
            states = self.along(state, decay, gain, first)
            state = states[:, -1]
            outputs.append((states.to(c.dtype) @ c[..., None]).squeeze(-1))
        output = torch.cat(outputs, dim=1).transpose(1, 2) + hidden_states * D[None, :, None]
        return output * silu(z), state


class ChunkScan(Scan):
    """Mamba-2's (arXiv 2405.21060, section 6): as Mamba's, with one decay for each head. Long ones begin in chunks."""

    def scan(
        self,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor,
        dt_bias: torch.Tensor | None = None,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states (batch, M, heads, width), dt (batch, M, heads), B, C (batch, M, groups, size), A, D (heads)."""
        heads, begun = hidden_states.shape[2], 0
        state, outputs = self.begin((heads, hidden_states.shape[3], B.shape[3])), []
        if hidden_states.shape[1] > MOST_TOGETHER:
            begun = hidden_states.shape[1] - ROWS
            parts = (each[:, :begun] for each in (hidden_states, dt, B, C))
            x, step, b, c = parts
            given = options | {"initial_states": state, "return_final_states": True}
            output, state = self._own(
                x, step, A, b, c, chunk_size=chunk_size, D=D, dt_bias=dt_bias, dt_limit=dt_limit, **given
            )
            outputs.append(output)
        x, b, c = (each[:, begun:].float() for each in (hidden_states, B, C))
        step = dt[:, begun:] if dt_bias is None else dt[:, begun:] + dt_bias.to(dt.dtype)
        step = softplus(step).clamp(*dt_limit).float()
        b, c = (each.repeat_interleave(heads // each.shape[2], dim=2) for each in (b, c))
        decay = torch.exp(A.float() * step)[..., None, None]
        gain = (x * step[..., None])[..., None] * b[:, :, :, None, :]
        states = self.along(state, decay, gain, begun)
        outputs.append((states @ c[..., None]).squeeze(-1) + D[:, None] * x)
        return torch.cat(outputs, dim=1).contiguous(), states[:, -1]


class DeltaRule(Scan):
    """The gated delta rule (arXiv 2412.06464, equation 10), row by row; long ones begin in chunks."""

    def scan(self, *given: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **options: Any) -> Any:
        """given: query, key (batch, M, key heads, size), value (batch, M, heads, size). g, beta: (batch, M, heads)."""
        key, value = given[1:]
        state, count, begun = self.begin((value.shape[2], key.shape[3], value.shape[3])), key.shape[1], 0
        outputs, states = [], []
        options["output_final_state"] = True

        def part(first: int, stop: int, scan: Callable[..., Any]) -> Any:
            rows = [each[:, first:stop] for each in given]
            own = options | {"initial_state": state}
            return scan(*rows, g=g[:, first:stop], beta=beta[:, first:stop], **own)

        if count > MOST_TOGETHER:
            begun = count - ROWS
            output, state = part(0, begun, self._own)
            outputs.append(output)
        for at in range(begun, count):
            output, after = part(at, at + 1, self._single)
            state = self.unless_padded(at, after, state)
            outputs.append(output)
            states.append(state)
        self.file(torch.stack(states, dim=1), begun)
        return torch.cat(outputs, dim=1), state


# What modules call their scans, and those for single rows.
SCANS: dict[str, tuple[type[Scan], str]] = {
    "mamba_selective_scan": (SelectiveScan, "mamba_selective_state_update"),
    "mamba2_chunk_scan": (ChunkScan, "mamba2_selective_state_update"),
    "torch_chunk_gated_delta_rule": (DeltaRule, "torch_recurrent_gated_delta_rule"),
}


def exchange_scans(model: PreTrainedModel, cache: HybridCache) -> None:
    """Give each recurrent module of this model its own `forward`, whose scan is one of ours."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        names = [name for name in SCANS if isinstance(forward, FunctionType) and name in forward.__code__.co_names]
        if isinstance(forward, FunctionType) and names:
            module.forward = MethodType(_with_scan(forward, names[0], module, cache), module)


def _with_scan(forward: FunctionType, name: str, module: Any, cache: HybridCache) -> FunctionType:
    kind, single = SCANS[name]
    known = forward.__globals__
    scan = kind(cache, int(module.layer_idx), known[name], known[single])
    made = FunctionType(
        forward.__code__, {**known, name: scan}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


@torch.inference_mode()
def state_bytes(model: PreTrainedModel) -> int:
    """What the states of a slot take, by trial: their shapes differ from family to family."""
    runner = HybridRunner(model, 1, 1)
    runner.run([Feed(0, 0, (0,), 1)])
    return runner.cache.state_bytes


class HybridRunner(LineRunner):
    """`Runner` around a causal model with recurrent layers."""

    def __init__(self, model: PreTrainedModel, slots: int, context: int) -> None:
        self._model = model
        self.cache = HybridCache(slots, context)
        first = next(model.parameters())
        self._dtype, self._device = first.dtype, first.device
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in known else "past_key_values"
        self._takes_positions = "position_ids" in known
        exchange_scans(model, self.cache)

    @property
    def kv_bytes(self) -> int:
        """As `HuggingFaceRunner.kv_bytes`, states included."""
        return self.cache.nbytes

    def zero(self, slot: int, stop: int) -> None:
        self.cache.zero(slot, stop)

    def copy(self, source: int, target: int, stop: int) -> None:
        self.cache.copy(source, target, stop)

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        ready = [self._from_state(feed) for feed in feeds]
        rows: dict[int, torch.Tensor] = {}
        narrow = [feed for feed in ready if len(feed.tokens) <= MOST_TOGETHER]
        for group in (narrow, *([feed] for feed in ready if len(feed.tokens) > MOST_TOGETHER)):
            if group:
                rows.update(zip((feed.slot for feed in group), self._rows(group), strict=True))
        return torch.cat([rows[feed.slot] for feed in feeds])

    def _from_state(self, feed: Feed) -> Feed:
        """The feed with the tokens before it, back to a state that is kept."""
        own = self.cache.slots[feed.slot]
        begin = own.nearest(feed.start)
        if feed.start - begin > MOST_AGAIN:
            begin = self._again(feed.slot, begin, own.tokens[: feed.start])
        return Feed(feed.slot, begin, [*own.tokens[begin : feed.start], *feed.tokens], feed.wanted)

    def _again(self, slot: int, begin: int, text: list[int]) -> int:
        """Feed the slot's text from `begin` on until few enough tokens are left; the position where they begin."""
        try:
            while len(text) - begin > MOST_AGAIN:
                self._rows([Feed(slot, begin, text[begin : begin + MOST_AGAIN], 0)])
                begin += MOST_AGAIN
        finally:
            self.cache.slots[slot].tokens = text  # each feed ends it where it ends itself
        return begin

    def _rows(self, feeds: Sequence[Feed]) -> list[torch.Tensor]:
        batch = PaddedBatch.of(feeds, self._device)
        options: dict[str, Any] = {
            self._cache_name: self.cache,
            "logits_to_keep": max(1, *(f.wanted for f in feeds), 1),
        }
        if self._takes_positions:
            mask = batch.mask(self._dtype)
            # Recurrent layers need none: padding changes no state.
            options["attention_mask"] = {"full_attention": mask, "linear_attention": None, "conv": None}
            options["position_ids"] = batch.positions
        self.cache.begin(feeds, batch)
        try:
            output = self._model(input_ids=batch.tokens, use_cache=True, **options)
        except BaseException:
            for feed in feeds:  # what was to be filed may not be
                self.cache.slots[feed.slot].void(feed.start)
            raise
        finally:
            self.cache.end()
        return [logits[-max(feed.wanted, 1) :] for feed, logits in zip(feeds, output.logits, strict=True)]
