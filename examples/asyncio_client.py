"""Stream a completion from another service, asyncio and nothing but grpcio and proto/: ADDRESS PROMPT.

Should the stream break, the text goes on where it stopped: the session lives in the log, not in the connection.
"""

import asyncio
import sys
import uuid

import grpc

from specwire.v1 import generation_pb2 as pb
from specwire.v1.generation_pb2_grpc import GenerationServiceStub


async def stream(address: str, prompt: str) -> None:
    request = pb.GenerateRequest(text=prompt, stopping={"max_tokens": 60}, request_id=str(uuid.uuid4()))
    seen = pb.WatchRequest(take_over=True)
    async with grpc.aio.insecure_channel(address) as channel:
        service = GenerationServiceStub(channel)
        events = service.Generate(request, timeout=60)
        while True:
            try:
                async for event in events:
                    if event.HasField("started") and not seen.session_id:
                        seen.session_id, seen.from_position = event.started.session_id, event.started.prompt_tokens
                    elif event.HasField("chunk"):
                        seen.from_position = event.chunk.position + len(event.chunk.tokens)
                        print(event.chunk.text, end="", flush=True)
                    elif event.HasField("finished"):
                        print(event.finished.text)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or not seen.session_id:
                    raise
            await asyncio.sleep(0.2)
            events = service.Watch(seen, timeout=60)


if __name__ == "__main__":
    sys.exit(asyncio.run(stream(*sys.argv[1:])) if len(sys.argv) == 3 else f"usage: {sys.argv[0]} ADDRESS PROMPT")
