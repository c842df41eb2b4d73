"""Frames have a bounded size, tenants' take turns, and arrays that are divided over several come together again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from array import array
from typing import Any

import pytest
from tests.support.peers import settle
from websockets.asyncio.server import ServerConnection, serve

from rookery import protocol
from rookery.aio import cancel_all
from rookery.clock import SystemClock
from rookery.protocol.connection import Channel, Outbox, ServiceEndpoint, stay_connected
from rookery.worker.connection import send_done
from rookery.worker.generation import FRAME_BYTES


class Sent:
    """A connection that keeps the frames."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    async def send(self, frame: bytes) -> None:
        self.frames.append(frame)

    async def receive(self) -> bytes:
        raise AssertionError

    async def close(self, reason: str) -> None:
        raise AssertionError


def channel(sent: Sent) -> Channel[Any]:
    key = protocol.read_key("k")
    welcome = protocol.Welcome(name="w", epoch=1, heartbeat_seconds=1.0, flush_seconds=1.0, reads=key, time=0.0)
    return Channel(sent, protocol.to_worker, welcome)


async def test_a_message_above_the_limit_is_refused_by_its_name_and_log_probabilities_are_divided() -> None:
    sent = Sent()
    logprobs = array("f", range(protocol.MAX_FRAME // 4)).tobytes()
    done = protocol.OperationDone(epoch=1, op="o", logprobs=logprobs, metrics={"loss": 1.0})
    with pytest.raises(protocol.FrameTooLarge, match="OperationDone has 67108"):
        await channel(sent).send(done)
    assert not sent.frames
    await send_done(channel(sent), done)
    answers: list[Any] = [protocol.decode(protocol.from_worker, frame) for frame in sent.frames]
    assert b"".join(answer.logprobs for answer in answers) == logprobs and {answer.op for answer in answers} == {"o"}
    assert [answer.more for answer in answers] == [True] * (len(answers) - 1) + [False]
    assert [answer.metrics for answer in answers if not answer.more] == [{"loss": 1.0}]
    assert max(map(len, sent.frames)) < 1.2 * FRAME_BYTES


def scores(count: int, width: int) -> protocol.PromptLogprobs:
    cells = range(count * width)
    return protocol.PromptLogprobs(
        logprobs=array("f", [-float(at) for at in range(count)]).tobytes(),
        top_tokens=array("i", [at if at % 7 else protocol.NO_TOKEN for at in cells]).tobytes(),
        top_logprobs=array("f", [-at / 2 for at in cells]).tobytes(),
    )


@pytest.mark.parametrize("width", [0, 1, 5])
def test_scores_come_together_from_parts_of_any_size_also_sent_twice(width: int) -> None:
    whole = scores(11, width)
    lines = list(whole)
    assert [line.logprob for line in lines] == [-float(at) for at in range(11)]
    for at, (_, top) in enumerate(lines):
        cells = range(at * width, (at + 1) * width)
        assert top == [(cell, -cell / 2) for cell in cells if cell % 7]
    for size in (1, 4, 11, 20):
        for repeated in (0, 2):
            joined = protocol.PromptLogprobs()
            for begin in range(0, 11, size):
                part = whole.part(max(0, begin - repeated), begin + size)
                assert part.fits(width, len(joined), 11) and not part.fits(width + 1, len(joined), 11)
                assert not part.fits(width, len(joined), part.first + len(part) - 1)
                joined.receive(part)
            assert joined == whole
    with pytest.raises(ValueError, match="do not follow"):
        protocol.PromptLogprobs().receive(whole.part(1, 2))
    assert not whole.part(1, 2).fits(width, 0, 11)
    assert not protocol.PromptLogprobs(logprobs=b"abc").fits(0, 0, 11)


def test_tokens_without_scores_come_before_those_with_some() -> None:
    padded = scores(2, 3).after(2, 3)
    assert [line.top for line in padded] == [[], [], *(line.top for line in scores(2, 3))]
    assert [line.logprob for line in padded][2:] == [0.0, -1.0] and padded.width == 3


async def test_a_peer_that_does_not_read_holds_output_back_soon() -> None:
    """Every heartbeat is behind the bytes that the system has accepted."""
    frame, accepted, blocked = bytes(64 << 10), 0, asyncio.Event()
    welcome = protocol.Welcome(
        name="w", epoch=1, heartbeat_seconds=1.0, flush_seconds=1.0, reads=protocol.read_key("k"), time=0.0
    )

    async def serve_slowly(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(protocol.encode(welcome))
        await blocked.wait()
        connection.transport.abort()

    async def converse(channel: Channel[Any]) -> None:
        nonlocal accepted
        result = protocol.OperationDone(epoch=1, op="o", logprobs=frame)
        with contextlib.suppress(TimeoutError):
            while accepted < 8 << 20:
                await asyncio.wait_for(channel.send(result), 0.3)
                accepted += len(frame)
        blocked.set()
        await asyncio.Event().wait()

    async with serve(serve_slowly, "127.0.0.1", 0, compression=None, max_queue=1) as server:
        [listening] = server.sockets
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        hello = protocol.HostHello(protocol=protocol.PROTOCOL, instance="i", environments=[])
        connected = asyncio.create_task(
            stay_connected(
                ServiceEndpoint(f"http://127.0.0.1:{listening.getsockname()[1]}", "/wire", "t"), protocol.to_worker,
                hello=lambda: hello, converse=converse, ping_seconds=10.0, ping_timeout=10.0,
            )
        )  # fmt: skip
        await blocked.wait()
        await cancel_all(connected)
    assert accepted < 1 << 20


class Gated(Sent):
    """A connection that accepts a frame at each turn of the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.accepted = asyncio.Semaphore(0), asyncio.Queue[bytes]()

    async def send(self, frame: bytes) -> None:
        await self.gate.acquire()
        await super().send(frame)
        self.accepted.put_nowait(frame)

    async def accept(self, count: int) -> None:
        for _ in range(count):
            self.gate.release()
            await self.accepted.get()

    def episodes(self) -> list[str]:
        return [message.episode for frame in self.frames if (message := protocol.decode(protocol.to_host, frame))]


def reset(episode: str, prompt: bytes = b"1") -> protocol.Reset:
    return protocol.Reset(call="", episode=episode, job="job", environment="task", options={}, prompt=prompt, seed=0)


async def test_a_tenants_messages_delay_anothers_by_one() -> None:
    connection = Gated()
    outbox = Outbox(connection, 1, SystemClock())
    offers = [outbox.offer(reset(f"a{number}"), "a") for number in range(1000)]
    writing = asyncio.create_task(outbox.write())
    await settle(1)
    outbox.offer(reset("b0"), "b")
    outbox.post(protocol.CloseEpisode(episode="a0"), "a")
    outbox.post(protocol.CloseEpisode(episode="b0"), "b")
    outbox.post(protocol.CloseEpisode(episode="stale"))
    offers[1].cancel()
    await connection.accept(6)
    assert connection.episodes() == ["a0", "stale", "b0", "a2", "b0", "a3"]
    assert [offer.done() for offer in offers[:5]] == [True, True, True, True, False]
    await cancel_all(writing)


async def test_a_frame_is_made_in_its_turn_and_one_that_cannot_be_made_fails_alone() -> None:
    connection = Gated()
    outbox = Outbox(connection, 1, SystemClock())
    first, large, last = reset("one"), reset("large", bytes(protocol.MAX_FRAME)), reset("last")
    unfit = [reset("unfit") for _ in range(3)]
    for message, value in zip(unfit, (1 << 70, object(), "\ud800"), strict=True):
        message.options = {"value": value}
    offers = [outbox.offer(message, "a") for message in (first, large, last, *unfit)]
    offers.append(outbox.offer(reset("after"), "a"))
    writing = asyncio.create_task(outbox.write())
    await settle(1)
    last.episode = "changed"  # no frame of it is kept
    await connection.accept(3)
    assert connection.episodes() == ["one", "changed", "after"]
    with pytest.raises(protocol.FrameTooLarge, match="Reset has 671"):
        await offers[1]
    for offer, error in zip(offers[3:6], (OverflowError, TypeError, UnicodeEncodeError), strict=True):
        with pytest.raises(error):
            await offer
    await asyncio.gather(offers[0], offers[2], offers[6])
    await cancel_all(writing)
