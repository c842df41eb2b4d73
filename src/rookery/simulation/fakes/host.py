"""A modelled environment host: every environment answers after a time of its own, side by side with the others, and
runs no code. Rewards are a function of the episode and its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from rookery import protocol
from rookery.protocol.connection import Connection, ConnectionClosed
from rookery.simulation.fakes.connection import MemoryConnection, connection_pair
from rookery.simulation.fakes.text import draw

Reward = Callable[[str, int], float]
"""(episode, turn) → the turn's reward."""


def uniform(episode: str, turn: int) -> float:
    """A reward in [0, 1): no two episodes of a group agree, so no group is without variance."""
    return draw("reward", episode, turn) / 2**64


class FakeHost:
    def __init__(
        self,
        serve: Callable[[Connection], Awaitable[None]],
        *,
        token: str,
        seconds: Mapping[str, float],
        prompt_tokens: int,
        turns: int = 1,
        reward: Reward = uniform,
        instance: str = "host",
        link: Callable[[], tuple[MemoryConnection, Connection]] = connection_pair,
    ) -> None:
        """``seconds`` maps each environment that it offers, by its whole name, to what its ``reset`` or ``step``
        takes; what it says has about ``prompt_tokens`` tokens of one byte; an episode has ``turns`` turns."""
        self.episodes: dict[str, dict[int, protocol.Observation]] = {}
        """By episode the answers so far: -1 the reset's, else the turn's."""
        self._serve = serve
        self._token = token
        self._seconds = dict(seconds)
        self._text = "x" * prompt_tokens
        self._turns = turns
        self._reward = reward
        self._instance = instance
        self._make_link = link
        self._names: dict[str, str] = {}
        self._epoch = -1
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._link: MemoryConnection | None = None

    async def join(self) -> None:
        """Dial in; returns when the host is welcome."""
        self._link, theirs = self._make_link()
        self._spawn(self._serve(theirs))
        hello = protocol.HostHello(
            protocol=protocol.PROTOCOL,
            token=self._token,
            instance=self._instance,
            environments=[protocol.HostedEnvironment(name=name, deterministic=True) for name in self._seconds],
        )
        await self._link.send(protocol.encode(hello))
        welcome = protocol.decode(protocol.to_host, await self._link.receive())
        if not isinstance(welcome, protocol.HostWelcome):
            raise PermissionError(f"the host was not welcomed: {welcome}")
        self._epoch = welcome.epoch
        self._spawn(self._beat(self._link, welcome.heartbeat_seconds))
        self._spawn(self._read(self._link))

    async def leave(self) -> None:
        """The connection is over."""
        if self._link is not None:
            self._link.cut()
        tasks = list(self._tasks)
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _beat(self, link: MemoryConnection, seconds: float) -> None:
        with suppress(ConnectionClosed):
            while True:
                await link.send(protocol.encode(protocol.HostHeartbeat(epoch=self._epoch, active=len(self.episodes))))
                await asyncio.sleep(seconds)

    async def _read(self, link: MemoryConnection) -> None:
        with suppress(ConnectionClosed):
            while True:
                message = protocol.decode(protocol.to_host, await link.receive())
                match message:
                    case protocol.CloseEpisode():
                        self.episodes.pop(message.episode, None)
                        self._names.pop(message.episode, None)
                    case protocol.GetPrompts():
                        numbers = range(message.start, message.start + message.count)
                        prompts = [b'{"%s": %d}' % (message.split.encode(), number) for number in numbers]
                        await link.send(
                            protocol.encode(protocol.Prompts(epoch=self._epoch, call=message.call, prompts=prompts))
                        )
                    case protocol.Reset() | protocol.StepEpisode():
                        self._begin(link, message)

    def _begin(self, link: MemoryConnection, message: protocol.Reset | protocol.StepEpisode) -> None:
        if isinstance(message, protocol.Reset):
            self._names[message.episode] = message.environment
        asyncio.get_running_loop().call_later(
            self._seconds[self._names[message.episode]], lambda: self._spawn(self._answer(link, message))
        )

    async def _answer(self, link: MemoryConnection, message: protocol.Reset | protocol.StepEpisode) -> None:
        with suppress(ConnectionClosed):
            await link.send(protocol.encode(self._observe(message)))

    def _observe(self, message: protocol.Reset | protocol.StepEpisode) -> protocol.Observation:
        """The answer; a repeated call gets the first one's."""
        turn = message.turn if isinstance(message, protocol.StepEpisode) else -1
        answers = self.episodes.setdefault(message.episode, {})
        if turn not in answers:
            answers[turn] = self._usual(message)
        answer = answers[turn]
        answer.call = message.call
        return answer

    def _usual(self, message: protocol.Reset | protocol.StepEpisode) -> protocol.Observation:
        answer = protocol.Observation(epoch=self._epoch, call="", episode=message.episode)
        said = [protocol.ChatMessage(role="user", content=self._text)]
        if isinstance(message, protocol.Reset):
            answer.messages = [protocol.ChatMessage(role="user", content=f"{message.prompt.decode()} {self._text}")]
        else:
            answer.done = message.turn + 1 >= self._turns
            answer.messages = [] if answer.done else said
            answer.reward = self._reward(message.episode, message.turn)
        return answer
