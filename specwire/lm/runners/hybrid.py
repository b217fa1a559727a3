"""Models with recurrent layers, by their own modules: rollback by index there, too.

A recurrent layer has no earlier position to go back to. So its state (the convolution's last inputs, and what its scan
carries on) is kept after each of the last rows of a feed, and a rollback picks one. Of the rows before, a few states
stay, spread over the text: a rollback to a position between them feeds the tokens from the nearest one on again.

Where memory is short a slot has fewer states, and windows are shorter (`most_window`). With a single one a text grows
as ever, and each rollback feeds it again from its start.

Convolutions take all rows at once. A module's own scan gives the state behind its last row only, so scans are ours:
within a window each row is computed by itself, straight into the cache where there is one text. A state that is kept is
written once. All else, most of a forward, is batched. Padding changes no state.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import silu, softplus
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specwire.core.model import Feed, ModelError
from specwire.lm.kv_cache import STATES, Runner, StoredSlots, rows_of
from specwire.lm.model_config import is_recurrent
from specwire.lm.runners.hugging_face import MOST_TOGETHER, PaddedBatch, SlotCache, together

# Tokens that are fed again in one forward.
MOST_AGAIN = 512
# Rows of Mamba's scan whose decays are computed at once.
BLOCK = 32
# What delta rules add to a squared length.
EPSILON = 1e-6


class KeptStates:
    """Which states of one slot are kept. The state behind no token is zero, and needs no place.

    tokens: that the slot was fed. places: by the number of tokens that a state stands behind, its place.
    """

    def __init__(self, states: int = STATES) -> None:
        self.tokens: list[int] = []
        self.places: dict[int, int] = {}
        self._rows = rows_of(states)
        self._free = list(range(states))

    def nearest(self, position: int) -> int:
        """The last position with a state, up to this one."""
        return max((each for each in self.places if each <= position), default=0)

    def feed(self, start: int, tokens: Sequence[int]) -> list[int]:
        """Take tokens behind the state at `start`; the columns (indices into them) whose states are kept from now on.

        Those behind `start` are void.
        """
        self.cut(start)
        self.tokens += tokens
        columns = list(range(max(0, len(tokens) - self._rows), len(tokens)))
        while len(self._free) < len(columns):
            self._drop(self._least_missed(start))
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

    def _least_missed(self, start: int) -> int:
        """The one behind which stand enough rows, and whose neighbours stand closest.

        The one at `start`, with which a forward begins, goes only where there is no other: each layer has read it
        before it writes its own.
        """
        held = [0, *sorted(self.places), len(self.tokens)]
        spare = [at for at in range(1, len(held) - 1) if held[at] != start and held[at] <= held[-1] - self._rows]
        return held[min(spare, key=lambda at: held[at + 1] - held[at - 1])] if spare else start


class ForwardStates(NamedTuple):
    """Which states one forward begins with and keeps; places are rows of a store.

    begin: (B,) places; `fresh` are the rows that begin with none. padding: columns before each row's first token;
    ragged: the same, (B,), None where there are none. row, behind, place: of each state that is kept, by column;
    behind: its column + 1. columns: by column the rows (None: all of them) and places. alone: by column the place,
    where there is one feed.
    """

    begin: torch.Tensor
    fresh: Sequence[int]
    padding: Sequence[int]
    ragged: torch.Tensor | None
    row: torch.Tensor
    behind: torch.Tensor
    place: torch.Tensor
    columns: dict[int, tuple[torch.Tensor | None, torch.Tensor]]
    alone: dict[int, int]


class HybridCache(SlotCache):
    """Beside keys and values: by layer the convolutions' tails and the scan's states, (slots * states, ...)."""

    def __init__(self, slots: int, context: int, states: int = STATES) -> None:
        super().__init__(slots, context)
        self.slots = [KeptStates(states) for _ in range(slots)]
        self.rows = rows_of(states)
        self._states_each = states
        self._kept: ForwardStates | None = None
        self._tails: dict[tuple[int, int], torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}

    def begin(self, feeds: Sequence[Feed], batch: PaddedBatch) -> None:
        width, device = batch.tokens.shape[1], batch.tokens.device
        begin, fresh, kept, paddings = [], [], list[tuple[int, int, int]](), []
        for row, feed in enumerate(feeds):
            own, padding, first = self.slots[feed.slot], width - len(feed.tokens), feed.slot * self._states_each
            if feed.start not in own.places:
                fresh.append(row)
            begin.append(first + own.places.get(feed.start, 0))
            columns = own.feed(feed.start, feed.tokens)
            kept += [(padding + at, row, first + own.places[feed.start + at + 1]) for at in columns]
            paddings.append(padding)
        kept.sort()
        column, row_of, place = torch.tensor(kept, device=device).unbind(1)
        by_column: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        done = 0
        for at, states in groupby(kept, key=itemgetter(0)):
            count = len(list(states))
            part = slice(done, done + count)
            by_column[at] = (None if count == len(feeds) else row_of[part], place[part])
            done += count
        self._kept = ForwardStates(
            torch.tensor(begin, device=device),
            fresh,
            paddings,
            torch.tensor(paddings, device=device) if any(paddings) else None,
            row_of,
            column + 1,
            place,
            by_column,
            {at: where for at, _, where in kept} if len(feeds) == 1 else {},
        )
        self.batch = batch

    def end(self) -> None:
        self.batch = self._kept = None

    # What the models' modules ask.

    def is_recording_past(self, layer_idx: int) -> bool:
        """Say yes: the modules then compute a single row as they compute several."""
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
        size, key = conv_kernel_size or conv_states.shape[-1], (layer_idx, state_idx)
        kept, _ = self._under_way()
        if key not in self._tails:
            self._tails[key] = conv_states.new_zeros(self._room, conv_states.shape[1], size)
        store = self._tails[key]
        tails = _found(store, kept)
        full = torch.cat((tails, conv_states), dim=-1)
        for row, padding in enumerate(kept.padding):
            if padding:  # the tail stands before the first token, not before the padding
                full[row, :, padding : padding + size] = tails[row]
        store.index_copy_(0, kept.place, full.unfold(2, size, 1)[kept.row, :, kept.behind])
        return full

    # What scans ask.

    @property
    def under_way(self) -> bool:
        """Whether a forward of ours is."""
        return self._kept is not None

    def padding(self) -> torch.Tensor | None:
        """(B,) columns of each row of a ragged batch that are none of its feed's; None where there are none."""
        return self._under_way()[0].ragged

    def states_before(self, layer: int, shape: Sequence[int]) -> torch.Tensor:
        """(B, *shape) float32: those that the feeds begin with."""
        kept, batch = self._under_way()
        if layer not in self._states:
            self._states[layer] = torch.zeros(self._room, *shape, device=batch.slots.device)
        return _found(self._states[layer], kept)

    def room_for(self, layer: int, column: int) -> torch.Tensor | None:
        """(1, *shape) where the state behind a column will be kept; None to give it to `file`."""
        place = self._under_way()[0].alone.get(column)
        return None if place is None else self._states[layer][place : place + 1]

    def file(self, layer: int, column: int, states: torch.Tensor) -> None:
        """Keep the states (B, *shape) behind a column, unless they lie in their room already or none is wanted."""
        kept, _ = self._under_way()
        if column in kept.columns and column not in kept.alone:
            rows, places = kept.columns[column]
            self._states[layer].index_copy_(0, places, states if rows is None else states[rows])

    def _under_way(self) -> tuple[ForwardStates, PaddedBatch]:
        if self._kept is None or self.batch is None:
            raise RuntimeError("the cache was used outside a forward")
        return self._kept, self.batch

    @property
    def _room(self) -> int:
        return self._size[0] * self._states_each

    def zero(self, slot: int, stop: int) -> None:
        super().zero(slot, stop)
        self.slots[slot] = KeptStates(self._states_each)
        first = slot * self._states_each
        for store in self._all_states():
            store[first : first + self._states_each].zero_()

    def copy(self, source: int, target: int, stop: int) -> None:
        super().copy(source, target, stop)
        self.slots[target] = self.slots[source].copied(stop)
        for store in self._all_states():
            places = torch.tensor([*self.slots[target].places.values()], dtype=torch.long, device=store.device)
            found = store.index_select(0, places + source * self._states_each)
            store.index_copy_(0, places + target * self._states_each, found)

    @property
    def kv_bytes(self) -> int:
        """States included."""
        return super().kv_bytes + self.state_bytes

    @property
    def state_bytes(self) -> int:
        return sum(store.nbytes for store in self._all_states())

    def _all_states(self) -> list[torch.Tensor]:
        return [*self._tails.values(), *self._states.values()]


def _found(store: torch.Tensor, kept: ForwardStates) -> torch.Tensor:
    """(B, ...): what the rows begin with."""
    found = store.index_select(0, kept.begin)
    for row in kept.fresh:
        found[row].zero_()
    return found


# ----------------------------------------------------------------------------------------------------------------------
# The scans of recurrent layers: the same recurrences as the models' own modules.


class Scan(ABC):
    """Stands in a mixer for its scan: the same recurrence, of which it files the states that are kept.

    Outside of a forward of ours it is the mixer's own.
    """

    def __init__(self, cache: HybridCache, layer: int, own: Callable[..., Any]) -> None:
        """own: the module's scan."""
        self._cache, self._layer, self._own = cache, layer, own

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.scan(*args, **options) if self._cache.under_way else self._own(*args, **options)

    @abstractmethod
    def scan(self, *args: Any, **options: Any) -> Any:
        """As the mixer's own scan is called."""

    def begin(self, shape: Sequence[int]) -> torch.Tensor:
        self._padding = self._cache.padding()
        return self._cache.states_before(self._layer, shape)

    def begun_in_chunks(self, count: int) -> int:
        """Rows that the module's own scan computes: of long feeds all but those whose states are kept."""
        return count - self._cache.rows if count > MOST_TOGETHER else 0

    def decayed(self, column: int, state: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        """A decayed state, to be changed in place. It lies where the one behind the column is kept, if it can."""
        return torch.mul(state, decay, out=self._cache.room_for(self._layer, column))

    def keep(self, column: int, state: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The state behind a column, which is filed. Padding leaves it as it was before."""
        if self._padding is not None:
            real = (self._padding <= column).view(-1, *[1] * (state.dim() - 1))
            state = torch.where(real, state, before)
        self._cache.file(self._layer, column, state)
        return state


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
            gain, b = (step * x.float())[..., None], b[:, :, None].float()
            for at in range(x.shape[1]):
                after = self.decayed(first + at, state, decay[:, at]).addcmul_(gain[:, at], b[:, at])
                state = self.keep(first + at, after, state)
                outputs.append((state.to(c.dtype) @ c[:, at, :, None]).squeeze(-1))
        output = torch.stack(outputs, dim=-1) + hidden_states * D[None, :, None]
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
        heads, begun = hidden_states.shape[2], self.begun_in_chunks(hidden_states.shape[1])
        state, outputs = self.begin((heads, hidden_states.shape[3], B.shape[3])), []
        if begun:
            x, step, b, c = (each[:, :begun] for each in (hidden_states, dt, B, C))
            given = options | {"initial_states": state, "return_final_states": True}
            output, state = self._own(
                x, step, A, b, c, chunk_size=chunk_size, D=D, dt_bias=dt_bias, dt_limit=dt_limit, **given
            )
            outputs.append(output)
        x, b, c = (each[:, begun:].float() for each in (hidden_states, B, C))
        step = dt[:, begun:] if dt_bias is None else dt[:, begun:] + dt_bias.to(dt.dtype)
        step = softplus(step).clamp(*dt_limit).float()
        b, c = (each.repeat_interleave(heads // each.shape[2], dim=2) for each in (b, c))
        decay, gain = torch.exp(A.float() * step)[..., None, None], (x * step[..., None])[..., None]
        b, c, rows = b[:, :, :, None], c[..., None], []
        for at in range(x.shape[1]):
            after = self.decayed(begun + at, state, decay[:, at]).addcmul_(gain[:, at], b[:, at])
            state = self.keep(begun + at, after, state)
            rows.append(state @ c[:, at])
        outputs.append(torch.stack(rows, dim=1).squeeze(-1) + D[:, None] * x)
        return torch.cat(outputs, dim=1).contiguous(), state


class DeltaRule(Scan):
    """The gated delta rule (arXiv 2412.06464, equation 10), one decay a head or, Kimi's, a channel.

    S_t = a_t S_(t-1) + k_t (beta_t (v_t - k_t a_t S_(t-1))), y_t = q_t S_t. Long ones begin in chunks.
    """

    def scan(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """query, key (batch, M, key heads, size), value (batch, M, heads, width), beta (batch, M, heads).

        g: logarithm of the decay, (batch, M, heads) or (batch, M, heads, size).
        """
        heads, begun = value.shape[2], self.begun_in_chunks(key.shape[1])
        state, outputs = self.begin((heads, key.shape[3], value.shape[3])), []
        if begun:
            rows = [each[:, :begun] for each in (query, key, value)]
            given = options | {"initial_state": state, "output_final_state": True}
            output, state = self._own(
                *rows, g=g[:, :begun], beta=beta[:, :begun], use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **given
            )
            outputs.append(output)
        q, k, v, rate, decay = (each[:, begun:].float() for each in (query, key, value, beta, g.exp()))
        if use_qk_l2norm_in_kernel:
            q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + EPSILON) for each in (q, k))
        if heads > k.shape[2]:
            q, k = (each.repeat_interleave(heads // each.shape[2], dim=2) for each in (q, k))
        q, across, down = (q * q.shape[-1] ** -0.5).unsqueeze(-2), k.unsqueeze(-2), k.unsqueeze(-1)
        v, rate = v.unsqueeze(-2), rate[..., None, None]
        decay = decay.view(*decay.shape, *[1] * (5 - decay.dim()))
        found = []
        for at in range(k.shape[1]):
            after = self.decayed(begun + at, state, decay[:, at])
            after.addcmul_(down[:, at], (v[:, at] - across[:, at] @ after) * rate[:, at])
            state = self.keep(begun + at, after, state)
            found.append(q[:, at] @ state)
        outputs.append(torch.stack(found, dim=1).squeeze(-2).to(query.dtype))
        return torch.cat(outputs, dim=1), state


# What modules call their scans.
SCANS: dict[str, type[Scan]] = {
    "mamba_selective_scan": SelectiveScan,
    "mamba2_chunk_scan": ChunkScan,
    "torch_chunk_gated_delta_rule": DeltaRule,
    "chunk_kimi_delta_attention": DeltaRule,
}
# What modules with a convolution ask of a cache.
TAIL = "update_conv_state"


def exchange_scans(model: PreTrainedModel, cache: HybridCache) -> list[nn.Module]:
    """Give each recurrent module of this model its own `forward`, whose scan is one of ours; those that keep states."""
    keeping: list[nn.Module] = []
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if not isinstance(forward, FunctionType):
            continue
        asked = forward.__code__.co_names
        if name := next((name for name in SCANS if name in asked), None):
            module.forward = MethodType(_with_scan(forward, name, module, cache), module)
        elif TAIL not in asked:
            continue
        keeping.append(module)
    return keeping


def _with_scan(forward: FunctionType, name: str, module: Any, cache: HybridCache) -> FunctionType:
    known = forward.__globals__
    scan = SCANS[name](cache, int(module.layer_idx), known[name])
    made = FunctionType(
        forward.__code__, {**known, name: scan}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


# ----------------------------------------------------------------------------------------------------------------------
# The runner.


class HybridRunner(StoredSlots, Runner):
    """`Runner` around a causal model with recurrent layers."""

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        context: int,
        states: int = STATES,
        taps: Sequence[int] = (),
    ) -> None:
        """states: of a slot. taps: as `specwire.lm.runners.decoder.Decoder`.

        ModelError where the model's layers cannot be tapped.
        """
        self.model, self.taps = model, taps
        self.cache = self.store = HybridCache(slots, context, states)
        first = next(model.parameters())
        self._dtype, self._device = first.dtype, first.device
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in known else "past_key_values"
        self._takes_positions = "position_ids" in known
        self._keeping = exchange_scans(model, self.cache)
        self.tapped = torch.empty(0)
        self._streams: dict[int, torch.Tensor] = {}
        self._tap()

    def _tap(self) -> None:
        """Note what enters the layers that are tapped, and the last norm."""
        base: Any = self.model.base_model
        parts = [*getattr(base, "layers", ()), getattr(base, "norm", None)]
        for tap in self.taps:
            part = parts[tap] if tap < len(parts) else None
            if part is None:
                raise ModelError(f"heads: a {type(self.model).__name__} has no layers that can be tapped")
            part.register_forward_pre_hook(lambda _, given, tap=tap: self._streams.update({tap: given[0]}))

    @property
    def most_window(self) -> int:
        return self.cache.rows - 1

    @property
    def state_bytes(self) -> int:
        return self.cache.state_bytes

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        ready = [self._from_state(feed) for feed in feeds]
        rows, features = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for group in together(ready):
            rows.update(zip((feed.slot for feed in group), self._rows(group), strict=True))
            if self.taps and self.tapping:
                features.update(self._features(group))
        if self.taps and self.tapping:
            self.tapped = torch.cat([features[feed.slot][-len(feed.tokens) :] for feed in feeds])
        return torch.cat([rows[feed.slot] for feed in feeds])

    def _features(self, feeds: Sequence[Feed]) -> dict[int, torch.Tensor]:
        """By slot (tokens, taps x hidden) of the last forward."""
        streams = torch.cat([self._streams.pop(tap) for tap in self.taps], dim=-1)
        return {feed.slot: stream[-len(feed.tokens) :] for feed, stream in zip(feeds, streams, strict=True)}

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
            options["attention_mask"] = self._masks(batch)
            options["position_ids"] = batch.positions
        output = self._within(feeds, batch, lambda: self.model(input_ids=batch.tokens, use_cache=True, **options))
        return [logits[-max(feed.wanted, 1) :] for feed, logits in zip(feeds, output.logits, strict=True)]

    def _masks(self, batch: PaddedBatch) -> dict[str, torch.Tensor | None]:
        """By kind of layer. Recurrent ones need none: padding changes no state."""
        return {"full_attention": batch.mask(self._dtype), "linear_attention": None, "conv": None}

    def _within(self, feeds: Sequence[Feed], batch: PaddedBatch, forward: Callable[[], Any]) -> Any:
        """What a forward gives that the cache takes part in."""
        self.cache.begin(feeds, batch)
        try:
            return forward()
        except BaseException:
            for feed in feeds:  # what was to be filed may not be
                self.cache.slots[feed.slot].void(feed.start)
            raise
        finally:
            self.cache.end()

    def try_layers(self) -> None:
        """Let each layer that keeps states keep one, of a text of one token."""
        feed = Feed(0, 0, (0,), 1)
        batch = PaddedBatch.of([feed], self._device)
        size = self.model.config.get_text_config().hidden_size
        hidden = torch.zeros(1, 1, size, dtype=self._dtype, device=self._device)

        def each_layer() -> None:
            for layer in self._keeping:
                known = inspect.signature(layer.forward).parameters
                layer.forward(hidden, **{"cache_params" if "cache_params" in known else "past_key_values": self.cache})

        self._within([feed], batch, each_layer)


@torch.inference_mode()
def state_bytes(model: PreTrainedModel) -> int:
    """Bytes of one state of a slot, by trial: their shapes differ from family to family. No weight is looked at."""
    runner = HybridRunner(model, slots=1, context=1, states=1)
    runner.try_layers()
    return runner.state_bytes


def slot_state_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes that the states of a slot take where memory is not short, by the configuration alone."""
    if not is_recurrent(config):
        return 0
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return STATES * state_bytes(model)
