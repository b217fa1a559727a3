"""Stream a completion without asyncio: ADDRESS PROMPT. Prints how many of the target's forwards were saved."""

import sys

import grpc

from specwire.v1 import generation_pb2 as pb
from specwire.v1.generation_pb2_grpc import GenerationServiceStub


def stream(address: str, prompt: str, max_tokens: int = 60) -> None:
    request = pb.GenerateRequest(text=prompt, stopping={"max_tokens": max_tokens})
    with grpc.insecure_channel(address) as channel:
        for event in GenerationServiceStub(channel).Generate(request, timeout=60):
            if event.HasField("chunk"):
                print(event.chunk.text, end="", flush=True)
            elif event.HasField("finished"):
                stats = event.finished.stats
                print(event.finished.text)
                figures = f"forwards: {stats.target_forwards}, saved: {stats.forwards_saved}"
                print(f"tokens: {stats.output_tokens}, {figures}", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} ADDRESS PROMPT")
    stream(sys.argv[1], sys.argv[2])
