"""What an HTTP/2 connection carries is counted frame by frame, in whatever pieces it comes."""

from __future__ import annotations

import pytest

from bench.relay.frames import MOST_CAPTURED, PREFACE, Count, Frames


def frame(kind: int, stream: int, payload: bytes, flags: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


SETTINGS = frame(4, 0, b"")
TRAFFIC = SETTINGS + frame(1, 1, b"headers") + frame(0, 1, b"abc") + frame(8, 0, b"1234") + frame(0, 3, b"defgh")


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_frames_are_counted_however_they_are_cut(piece: int) -> None:
    sent = PREFACE + TRAFFIC
    frames = Frames(client=True)
    for at in range(0, len(sent), piece):
        frames.feed(sent[at : at + piece])
    assert frames.count == Count(bytes=len(sent), frames=5, data_frames=2, data_bytes=8)


def test_a_server_has_no_preface_and_padding_is_no_payload() -> None:
    frames = Frames(client=False)
    frames.feed(TRAFFIC)
    assert frames.count.data_bytes == 8
    frames.feed(frame(0, 1, b"\x02abc..", flags=8))
    assert frames.count.data_bytes == 8 + 3


@pytest.mark.parametrize("client", [True, False])
def test_what_is_no_http2_is_counted_as_bytes_alone(client: bool) -> None:
    frames = Frames(client)
    for _ in range(3):
        frames.feed(bytes(100))
    assert frames.count == Count(bytes=300)


def test_payload_is_captured_by_stream_once_asked_for() -> None:
    frames = Frames(client=False)
    frames.feed(TRAFFIC)
    assert frames.take_captured() == {}
    frames.feed(frame(0, 1, b"") + frame(0, 3, b""))
    frames.capture()
    frames.feed(frame(0, 1, b"ab") + frame(0, 3, b"x") + frame(0, 1, b"cd"))
    frames.feed(frame(0, 5, b"a call that was made meanwhile"))
    assert frames.take_captured() == {1: b"abcd", 3: b"x"}
    frames.feed(frame(0, 1, b"ef"))
    assert frames.take_captured() == {}


def test_capturing_has_an_end() -> None:
    frames = Frames(client=False)
    frames.feed(SETTINGS + frame(0, 1, b""))
    frames.capture()
    for _ in range(4):
        frames.feed(frame(0, 1, bytes(MOST_CAPTURED // 3)))
    assert len(frames.take_captured()[1]) == MOST_CAPTURED // 3 * 3
