"""Scans of recurrent layers that file the state behind each row: the same recurrences as the models' own modules.

A module's own scan gives the state behind its last row only. So within a window each row is computed here, straight
into the cache where there is one text: a state that is kept is written once. All else, most of a forward, is batched.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import conv1d, silu, softplus
from transformers import PreTrainedModel

from specwire.lm.runners.hugging_face import MOST_TOGETHER

# Rows of Mamba's scan whose decays are computed at once.
BLOCK = 32
# What delta rules add to a squared length.
EPSILON = 1e-6
# A logarithm of no weight at all.
NOTHING = -1e38


class StateCache(Protocol):
    """Where states lie. rows: the last rows of a feed, of which each one's is kept."""

    rows: int

    @property
    def under_way(self) -> bool:
        """Whether a forward of ours is."""
        ...

    def padding(self) -> torch.Tensor | None:
        """(B,) columns of each row of a ragged batch that are none of its feed's; None where there are none."""
        ...

    def states_before(self, layer: int, shape: Sequence[int]) -> torch.Tensor:
        """(B, *shape) float32: those that the feeds begin with."""
        ...

    def room_for(self, layer: int, column: int) -> torch.Tensor | None:
        """(1, *shape) where the state behind a column will be kept; None to give it to `file`."""
        ...

    def file(self, layer: int, column: int, states: torch.Tensor) -> None:
        """Keep the states (B, *shape) behind a column, unless they lie in their room already or none is wanted."""
        ...

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_options: Any,
    ) -> torch.Tensor:
        """(B, channels, M) in; with the tails before it, (B, channels, kernel + M), out."""
        ...


class Scan(ABC):
    """Stands in a mixer for its scan: the same recurrence, of which it files the states that are kept.

    Outside of a forward of ours it is the mixer's own.
    """

    def __init__(self, cache: StateCache, layer: int, own: Callable[..., Any]) -> None:
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


class LinearUnit(Scan):
    """RecurrentGemma's RG-LRU (arXiv 2402.19427, equation 4), its gates applied: h_t = a_t h_(t-1) + x_t."""

    def scan(
        self, hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, reset: torch.Tensor, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden_states, recurrent_gate (batch, M, width). reset: (batch, M, 1), at position 0."""
        gate, x = (recurrent_gate * ~reset).float(), hidden_states.float()
        state, outputs = self.begin(x.shape[2:]), []
        for at in range(x.shape[1]):
            state = self.keep(at, self.decayed(at, state, gate[:, at]).add_(x[:, at]), state)
            outputs.append(state)
        return torch.stack(outputs, dim=1).to(hidden_states.dtype), state


class Block(Scan):
    """Stands for the `forward` of a whole module, which would have its states elsewhere than in a cache."""

    def __init__(self, cache: StateCache, layer: int, module: Any) -> None:
        super().__init__(cache, layer, MethodType(type(module).forward, module))
        self._module = module


class RecurrentBlock(Block):
    """RecurrentGemma's, which has its states in itself."""

    def __init__(self, cache: StateCache, layer: int, module: Any) -> None:
        super().__init__(cache, layer, module)
        unit = module.rg_lru
        unit._rnn_scan = LinearUnit(cache, layer, MethodType(type(unit)._rnn_scan, unit))

    def scan(
        self, input_states: torch.Tensor, position_ids: torch.Tensor, **_options: Any
    ) -> tuple[torch.Tensor, None]:
        """input_states (batch, M, hidden)."""
        own, count = self._module, input_states.shape[1]
        x = own.linear_x(input_states).transpose(1, 2)
        x = self._cache.update_conv_state(x, self._layer, conv_kernel_size=own.conv1d_width)
        x = conv1d(x, own.conv_1d.weight, own.conv_1d.bias, groups=x.shape[1])[..., -count:]
        x = own.rg_lru(x.transpose(1, 2), position_ids)
        return own.linear_out(x * own.act_fn(own.linear_y(input_states))), None


class RwkvBlock(Block):
    """Parts of RWKV-4's (arXiv 2305.13048, section 3), whose states go along with their rows."""

    def mixed(self, hidden: torch.Tensor, *names: str) -> list[torch.Tensor]:
        """Each row with a part of the one before it (equations 11 to 13), by the mixes of these names."""
        shifted = self._cache.update_conv_state(hidden.transpose(1, 2), self._layer, conv_kernel_size=1)
        before = shifted[..., :-1].transpose(1, 2)
        mixes = [getattr(self._module, f"time_mix_{name}") for name in names]
        return [hidden * mix + before * (1 - mix) for mix in mixes]


class TimeMixing(RwkvBlock):
    """Equation 16, by sums whose weights are at most 1: (numerator, denominator, logarithm of what both lack)."""

    def scan(self, hidden: torch.Tensor, state: Any = None, **_options: Any) -> tuple[torch.Tensor, Any]:
        """Of hidden (batch, M, width). The model's own state is passed on."""
        own, (key, value, receptance) = self._module, self.mixed(hidden, "key", "value", "receptance")
        k, v, decay = own.key(key).float(), own.value(value).float(), -torch.exp(own.time_decay.float())
        held, outputs = self.begin((3, k.shape[2])), []
        # Where nothing was read, it has no weight.
        held[:, 2].masked_fill_(held[:, 1] == 0, NOTHING)
        for at in range(k.shape[1]):
            numerator, denominator, lacking = held.unbind(1)
            past, now = _weights(lacking, k[:, at] + own.time_first)[:2]
            outputs.append((past * numerator + now * v[:, at]) / (past * denominator + now))
            past, now, peak = _weights(lacking + decay, k[:, at])
            parts = (past * numerator + now * v[:, at], past * denominator + now, peak)
            after = torch.stack(parts, dim=1, out=self._cache.room_for(self._layer, at))
            held = self.keep(at, after, held)
        found = torch.stack(outputs, dim=1).to(hidden.dtype)
        return own.output(torch.sigmoid(own.receptance(receptance)) * found), state


def _weights(past: torch.Tensor, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of two logarithms, divided by the larger weight; and that one's logarithm."""
    peak = torch.maximum(past, now)
    return torch.exp(past - peak), torch.exp(now - peak), peak


class ChannelMixing(RwkvBlock):
    """Equations 17 and 18."""

    def scan(self, hidden: torch.Tensor, state: Any = None, **_options: Any) -> tuple[torch.Tensor, Any]:
        """As `TimeMixing.scan`."""
        own, (key, receptance) = self._module, self.mixed(hidden, "key", "receptance")
        return torch.sigmoid(own.receptance(receptance)) * own.value(torch.relu(own.key(key)).square()), state


# What modules call their scans, and what their blocks are called that are replaced as a whole.
SCANS: dict[str, type[Scan]] = {
    "mamba_selective_scan": SelectiveScan,
    "mamba2_chunk_scan": ChunkScan,
    "torch_chunk_gated_delta_rule": DeltaRule,
    "chunk_kimi_delta_attention": DeltaRule,
}
BLOCKS: dict[str, type[Block]] = {
    "RecurrentGemmaRecurrentBlock": RecurrentBlock,
    "RwkvSelfAttention": TimeMixing,
    "RwkvFeedForward": ChannelMixing,
}
# What modules with a convolution ask of a cache.
TAIL = "update_conv_state"


def exchange_scans(model: PreTrainedModel, cache: StateCache) -> list[nn.Module]:
    """Give each recurrent module of this model its own `forward`, whose scan is one of ours; those that keep states."""
    keeping: list[nn.Module] = []
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if not isinstance(forward, FunctionType):
            continue
        block, asked = BLOCKS.get(type(module).__name__), forward.__code__.co_names
        if block is not None:
            module.forward = block(cache, len(keeping), module)
        elif name := next((name for name in SCANS if name in asked), None):
            module.forward = MethodType(_with_scan(forward, name, module, cache), module)
        elif TAIL not in asked:
            continue
        keeping.append(module)
    return keeping


def _with_scan(forward: FunctionType, name: str, module: Any, cache: StateCache) -> FunctionType:
    known = forward.__globals__
    scan = SCANS[name](cache, int(module.layer_idx), known[name])
    made = FunctionType(
        forward.__code__, {**known, name: scan}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made
