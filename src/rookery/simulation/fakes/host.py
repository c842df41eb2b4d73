"""A fake environment host: runs no code. A reply is a function of its call and takes a stated time; a repeated call
gets the same reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from rookery import protocol
from rookery.aio import BackgroundTasks
from rookery.protocol.connection import ConnectionClosed, introduce
from rookery.simulation.fakes.connection import MemoryConnection
from rookery.simulation.fakes.text import draw

EpisodeCall = protocol.Reset | protocol.StepEpisode
Observe = Callable[[EpisodeCall], dict[str, Any] | None]
"""A call → the fields of its ``Observation``, or None for no reply at all."""


def uniform_reward(episode: str, turn: int) -> float:
    """A reward in [0, 1): no two episodes of a group agree, so no group is without variance."""
    return draw("reward", episode, turn) / 2**64


NO_SPEAKERS: Mapping[str, Sequence[str]] = {}


def fixed_turns(
    turns: int,
    text: str,
    reward: Callable[[str, int], float] = uniform_reward,
    speakers: Mapping[str, Sequence[str]] = NO_SPEAKERS,
) -> Observe:
    """Episodes of so many turns, each of which asks with ``text``; ``reward`` maps (episode, turn). In the environments
    of ``speakers`` each of these policies replies once, in this order."""
    speaking: dict[str, Sequence[str]] = {}

    def observe(call: EpisodeCall) -> dict[str, Any]:
        if isinstance(call, protocol.Reset):
            speaking[call.episode] = speakers.get(call.environment, ())
            return {"messages": [user_message(f"{call.prompt.decode()} {text}")]}
        names = speaking.get(call.episode, ())
        done = call.turn + 1 >= (len(names) or turns)
        if done:
            speaking.pop(call.episode, None)
            return {"reward": reward(call.episode, call.turn), "done": True}
        answer = {"messages": [user_message(text)], "reward": reward(call.episode, call.turn)}
        return answer | ({"policy": names[call.turn + 1]} if names else {})

    return observe


def user_message(content: str) -> protocol.ChatMessage:
    return protocol.ChatMessage(role="user", content=content)


class FakeHost:
    def __init__(
        self,
        dial: Callable[[], MemoryConnection],
        *,
        environments: Mapping[str, bool],
        observe: Observe,
        instance: str = "host",
        seconds: Callable[[str], float] = lambda environment: 0.0,
        keeps_episodes: bool = True,
    ) -> None:
        """``environments``: by full name, whether an environment is deterministic. ``seconds(environment)`` is the time
        of one of its replies; that of prompts is ``seconds("")``. Unless it ``keeps_episodes``, a host
        also steps episodes that it never reset."""
        self.instance = instance
        self.environments = dict(environments)
        self.episodes: dict[str, dict[int, protocol.Observation]] = {}
        """By episode the replies so far: -1 the reset's, else the turn's."""
        self.connection: MemoryConnection | None = None
        self.dial = dial
        self.epoch = -1
        self._observe = observe
        self._seconds = seconds
        self._keeps_episodes = keeps_episodes
        self._names: dict[str, str] = {}
        self._tasks = BackgroundTasks()

    async def join(self) -> FakeHost:
        """Dial in; returns when the host is welcome. Raises ``RegistrationRefused``."""
        self.connection = connection = self.dial()
        hello = protocol.HostHello(
            protocol=protocol.PROTOCOL, instance=self.instance,
            episodes=list(self.episodes) if self._keeps_episodes else [],
            environments=[protocol.HostedEnvironment(name=n, deterministic=d) for n, d in self.environments.items()],
        )  # fmt: skip
        welcome = await introduce(connection, hello, protocol.to_host)
        self.epoch = welcome.epoch
        self._tasks.start(self._heartbeat(connection, welcome.heartbeat_seconds))
        self._tasks.start(self._read(connection))
        return self

    async def run(self, redial_seconds: Callable[[], float]) -> None:
        """Join, and join again after each end of the connection, until cancelled."""
        while True:
            with suppress(ConnectionClosed, TimeoutError):
                await self.join()
                assert self.connection is not None
                await self.connection.wait_closed()
            if self.connection is not None:
                self.connection.cut()
            await asyncio.sleep(redial_seconds())

    async def leave(self) -> None:
        """The connection ends; the process and its episodes stay."""
        if self.connection is not None:
            self.connection.cut()
        await self._tasks.cancel()

    async def _heartbeat(self, connection: MemoryConnection, seconds: float) -> None:
        with suppress(ConnectionClosed):
            while True:
                heartbeat = protocol.HostHeartbeat(epoch=self.epoch, active=len(self.episodes))
                await connection.send(protocol.encode(heartbeat))
                await asyncio.sleep(seconds)

    async def _read(self, connection: MemoryConnection) -> None:
        with suppress(ConnectionClosed):
            while True:
                await self.handle(connection, protocol.decode(protocol.to_host, await connection.receive()))

    async def handle(self, connection: MemoryConnection, message: Any) -> None:
        """Act on a message of the service."""
        environment = ""
        match message:
            case protocol.CloseEpisode():
                self.episodes.pop(message.episode, None)
                self._names.pop(message.episode, None)
                return
            case protocol.Reset():
                environment = self._names[message.episode] = message.environment
            case protocol.StepEpisode():
                environment = self._names.get(message.episode, "")
            case protocol.GetPrompts():
                pass
            case _:
                return
        seconds = self._seconds(environment)
        if seconds > 0:
            asyncio.get_running_loop().call_later(seconds, lambda: self._tasks.start(self._reply(connection, message)))
        else:
            await self._reply(connection, message)

    async def _reply(self, connection: MemoryConnection, message: Any) -> None:
        reply = self.prompts(message) if isinstance(message, protocol.GetPrompts) else self.observe(message)
        if reply is not None:
            with suppress(ConnectionClosed):
                await connection.send(
                    protocol.encode(msgspec.structs.replace(reply, epoch=self.epoch, call=message.call))
                )

    def prompts(self, message: protocol.GetPrompts) -> protocol.Prompts:
        numbers = range(message.start, message.start + message.count)
        prompts = [b'{"%s":%d}' % (message.split.encode(), number) for number in numbers]
        return protocol.Prompts(call="", prompts=prompts)

    def observe(self, call: EpisodeCall) -> protocol.Observation | None:
        """The reply to a call: the first one's, where it was made before."""
        turn = call.turn if isinstance(call, protocol.StepEpisode) else -1
        replies = self.episodes.setdefault(call.episode, {})
        if turn not in replies:
            blank = protocol.Observation(call="", episode=call.episode)
            if self._keeps_episodes and turn >= 0 and turn - 1 not in replies:
                return msgspec.structs.replace(blank, error="the episode is not alive here")
            fields = self._observe(call)
            if fields is None:
                return None
            replies[turn] = msgspec.structs.replace(blank, **fields)
        return replies[turn]
