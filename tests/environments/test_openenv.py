from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.peers import settle
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from rookery.environments.base import Reply
from rookery.environments.builtins import find
from rookery.environments.openenv import OpenEnv, OpenEnvOptions, ServerSessions, SessionLost, fenced_texts
from rookery.environments.outbound import reachable_hosts, set_reachable_hosts
from rookery.errors import UserError
from rookery.simulation.clock import run as run_virtually


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "exactly one of url and urls"),
        ({"url": "http://8.8.8.8", "urls": ["http://8.8.8.8"], "resets": [{}]}, "exactly one of url and urls"),
        ({"url": "http://8.8.8.8"}, "exactly one of resets and split"),
        ({"url": "http://8.8.8.8", "resets": [{}], "split": "train"}, "exactly one of resets and split"),
        ({"url": "http://8.8.8.8", "resets": [{}], "template": "x"}, "template contains {observation}"),
        ({"url": "http://8.8.8.8", "resets": [3]}, "environment.resets.0"),
        ({"url": "ftp://8.8.8.8", "resets": [{}]}, "environment.url: given 'ftp://8.8.8.8'"),
        ({"url": "http://127.0.0.1:1", "resets": [{}]}, "environment.url: 127.0.0.1 is 127.0.0.1, which is not"),
        ({"urls": ["http://169.254.169.254"], "resets": [{}]}, "environment.urls.0: 169.254.169.254 is"),
        ({"url": "http://8.8.8.8", "resets": [{}], "color": 1}, "environment.color"),
    ],
)
def test_options_that_name_no_server_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        find("openenv").validate_options(options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


async def fill(sessions: ServerSessions, room: int) -> int:
    """Opens sessions at a server with so much ``room`` until it refuses one; those that are open."""
    while True:
        url = await sessions.position(["u"])
        if sessions.open[url] > room:
            await sessions.leave(url, full=True)
            return sessions.open[url]
        await sessions.opened(url)


def test_the_limit_of_a_server_falls_with_a_refusal_and_rises_with_its_room() -> None:
    async def main() -> None:
        sessions = ServerSessions(again_seconds=0.2)
        assert await fill(sessions, room=4) == 4 and sessions.limits == {"u": 4}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await sessions.position(["u"])
        for _ in range(4):
            await sessions.leave("u")
        assert await fill(sessions, room=2) == 2 and sessions.limits == {"u": 2}
        assert await fill(sessions, room=64) == 64, "one that is tried again and has room is filled"

    run_virtually(main())


def test_a_session_that_the_server_counts_too_long_costs_its_place_for_a_while() -> None:
    async def main() -> None:
        sessions = ServerSessions(again_seconds=0.05)
        assert await fill(sessions, room=4) == 4
        for _ in range(3):
            await sessions.leave("u")
            assert await fill(sessions, room=3) == 3
        for _ in range(20):  # others come and go meanwhile
            await sessions.leave("u")
            await sessions.position(["u"])
            await asyncio.sleep(0.005)
        assert await fill(sessions, room=4) == 4

    run_virtually(main())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["```", "json", " ", "\t", "\n", "x", "`"]), max_size=14).map("".join))
def test_fenced_blocks_are_found_as_by_one_pattern(reply: str) -> None:
    assert fenced_texts(reply) == re.findall(r"(?s)```(?:json)?[ \t]*\n(.*?)\n[ \t]*```", reply)


@pytest.mark.parametrize("part", ["x```\n", "```\n\t", "```\t", "\n\t\t", "```json\n{}\n```\n", "`"])
def test_fenced_blocks_are_found_in_linear_time(part: str) -> None:
    began = time.thread_time()
    fenced_texts(part * (200_000 // len(part)))
    assert time.thread_time() - began < 2  # quadratic time takes a minute


@pytest.mark.parametrize(
    ("reply", "read"),
    [
        ({"done": True, "reward": 0.5}, (0.5, True)),
        ({"done": False, "reward": None}, (0.0, False)),
        ({"reward": 1}, (1.0, False)),
        ({"done": None, "reward": True}, (1.0, False)),
        ({"done": "false", "reward": 1}, 'done is neither true nor false, but "false"'),
        ({"done": 0, "reward": 1}, "done is neither true nor false, but 0"),
        ({"done": True, "reward": "0.5"}, 'the reward is no number, but "0.5"'),
        ({"done": True, "reward": "nan"}, 'the reward is no number, but "nan"'),
        ({"done": True, "reward": [1]}, r"the reward is no number, but \[1\]"),
    ],
)
async def test_the_end_and_the_reward_of_a_step_are_of_their_types(
    reply: dict[str, Any], read: tuple[float, bool] | str
) -> None:
    async def observe(connection: ServerConnection) -> None:
        async for _ in connection:
            await connection.send(json.dumps({"type": "observation", "data": {"observation": {}, **reply}}))

    async with server(observe) as url:
        episode = await opened(url)
        if isinstance(read, str):
            with pytest.raises(SessionLost, match=f"is lost: {read}"):
                await episode.step(Reply("{}", [], [], 0))
        else:
            step = await episode.step(Reply("{}", [], [], 0))
            assert (step.reward, step.done) == read
        await episode.close()


async def test_a_session_whose_end_is_cancelled_is_counted_as_left() -> None:
    """A silent server keeps the end of the connection waiting."""

    async def fall_silent(connection: ServerConnection) -> None:
        await connection.recv()
        connection.transport.pause_reading()
        await connection.send('{"type": "observation", "data": {"observation": {}}}')
        await connection.wait_closed()

    sessions = ServerSessions()
    async with server(fall_silent) as url:
        episode = await opened(url, sessions)
        assert sessions.open.total() == 1
        ends = asyncio.create_task(episode.close())
        await settle()
        assert not ends.done()
        ends.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ends
        assert sessions.open.total() == 0


@contextlib.asynccontextmanager
async def server(converse: Callable[[ServerConnection], Awaitable[None]]) -> AsyncIterator[str]:
    """The address of a server on this machine, which ``converse`` serves a session of."""

    def schema(connection: ServerConnection, request: Request) -> Response | None:
        return connection.respond(HTTPStatus.OK, '{"action": {}}') if request.path == "/schema" else None

    before = reachable_hosts()
    set_reachable_hosts("127.0.0.1")
    try:
        async with serve(converse, "127.0.0.1", 0, process_request=schema, close_timeout=0.1) as serving:
            yield f"http://127.0.0.1:{next(iter(serving.sockets)).getsockname()[1]}"
    finally:
        set_reachable_hosts(before)


async def opened(url: str, sessions: ServerSessions | None = None) -> OpenEnv:
    """An episode that has begun."""
    episode = await asyncio.to_thread(OpenEnv, OpenEnvOptions(url=url, resets=[{}]), sessions)
    await episode.reset({}, 0)
    return episode
