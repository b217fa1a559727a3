"""Client of GenerationService: `Client` blocks, `AsyncClient` is for asyncio. Both speak in the same events."""

from specwire.client.aio import AsyncClient
from specwire.client.blocking import Client
from specwire.client.events import (
    ChatDelta,
    Chunk,
    Completion,
    DrafterStats,
    Event,
    Finished,
    PartScore,
    PromptEcho,
    SamplingInForce,
    SessionState,
    SpecwireError,
    Started,
    Stats,
    Step,
    TextScore,
    Timings,
    ToolCall,
    ToolCallDelta,
)
from specwire.client.requests import Chat
from specwire.core.messages import TokenLogprobs
from specwire.rpc.tls import ClientTls

__all__ = [
    "AsyncClient",
    "Chat",
    "ChatDelta",
    "Chunk",
    "Client",
    "ClientTls",
    "Completion",
    "DrafterStats",
    "Event",
    "Finished",
    "PartScore",
    "PromptEcho",
    "SamplingInForce",
    "SessionState",
    "SpecwireError",
    "Started",
    "Stats",
    "Step",
    "TextScore",
    "Timings",
    "TokenLogprobs",
    "ToolCall",
    "ToolCallDelta",
]
