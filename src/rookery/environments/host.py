"""Runs environments for a controller that it dials.

Promises:

* The connection may break and come back at any time: live episodes stay, and a call that is sent again is answered from
  memory, so no ``reset`` and no ``step`` ever happens twice in one environment.
* What an environment raises, or returns wrongly or too large, becomes that call's error and nothing else. A slow one
  delays nobody.
* Rewards are passed on as they are, not-a-number included: the controller decides what they are worth.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from rookery import protocol
from rookery.environments.base import Environment
from rookery.environments.builtins import Builtin
from rookery.environments.datasets import PromptDataset
from rookery.environments.episodes import Episodes, describe, one_line
from rookery.environments.user_code import UserCodeExecutor
from rookery.errors import UserError

log = logging.getLogger("rookery.environments")

MAX_PROTOTYPES = 256
"""Environments kept built, one per (name, options) in use; the one unused longest is built again when needed."""

BACKOFF_SECONDS = (0.2, 5.0)
"""Waits between attempts to connect double from the first to the second, each times a random 0.5 … 1."""

PING_SECONDS, PING_TIMEOUT = 5.0, 10.0
"""A link whose other end is silently gone is given up within their sum, well within jobs' return_timeout."""

Hosted = Environment | type[Environment] | Builtin
"""An object (episodes are copies of it), a class (built from the job's options), or a built-in."""


@dataclass
class _Prototype:
    environment: Environment
    splits: dict[str, PromptDataset]


class Host:
    """One environment host: one connection at a time, any number of episodes."""

    def __init__(self, url: str, token: str, environments: Mapping[str, Hosted], instance: str | None = None) -> None:
        """``url`` is the service's (http or https), ``instance`` names this process: who comes back under the same
        name still has its episodes."""
        self._url, self._token = url, token
        self._offers = dict(environments)
        self._instance = instance or f"host-{uuid.uuid4().hex}"
        self._prototypes: dict[tuple[str, bytes], asyncio.Task[_Prototype]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._link: ClientConnection | None = None
        self._epoch = 0
        self._calls = UserCodeExecutor()
        self._episodes = Episodes(self._calls, self._environment)
        self.connected = asyncio.Event()
        """Set while the controller has welcomed this host."""

    async def run(self) -> None:
        """Serve until cancelled. Raises :class:`UserError` when the service refuses this host."""
        first, most = BACKOFF_SECONDS
        wait = first
        try:
            while True:
                try:
                    async with connect(
                        link_url(self._url, "/wire/host"),
                        max_size=protocol.MAX_FRAME,
                        ping_interval=PING_SECONDS,
                        ping_timeout=PING_TIMEOUT,
                        proxy=None if _is_local(self._url) else True,
                    ) as link:
                        beat = await self._greet(link)
                        wait = first
                        await self._serve(link, beat)
                except (OSError, InvalidHandshake, ConnectionClosed, protocol.BadFrame) as error:
                    log.warning("no link to %s (%s); trying again", self._url, one_line(error))
                finally:
                    self._link = None
                    self.connected.clear()
                await asyncio.sleep(wait * random.uniform(0.5, 1))
                wait = min(wait * 2, most)
        finally:
            await self._end()

    # --- the link -----------------------------------------------------------------------------------------------------

    async def _greet(self, link: ClientConnection) -> float:
        offers = [
            protocol.HostedEnvironment(
                name=name,
                deterministic=(offer.environment if isinstance(offer, Builtin) else offer).deterministic,
            )
            for name, offer in self._offers.items()
        ]
        hello = protocol.HostHello(
            protocol=protocol.PROTOCOL,
            token=self._token,
            instance=self._instance,
            environments=offers,
            episodes=self._episodes.names(),
        )
        await link.send(protocol.encode(hello))
        answer = protocol.decode(protocol.to_host, await _binary(link))
        if isinstance(answer, protocol.HelloRejected):
            raise UserError(f"the service refuses this environment host: {answer.reason}")
        if not isinstance(answer, protocol.HostWelcome):
            raise protocol.BadFrame(f"expected a welcome, got {type(answer).__name__}")
        self._link, self._epoch = link, answer.epoch
        self.connected.set()
        return answer.heartbeat_seconds

    async def _serve(self, link: ClientConnection, heartbeat_seconds: float) -> None:
        async def beat() -> None:
            while True:
                await link.send(
                    protocol.encode(protocol.HostHeartbeat(epoch=self._epoch, active=len(self._episodes.names())))
                )
                await asyncio.sleep(heartbeat_seconds)

        beats = asyncio.create_task(beat())
        try:
            while True:
                message = protocol.decode(protocol.to_host, await _binary(link))
                if isinstance(message, protocol.GetPrompts):
                    self._spawn(self._prompts(message))
                elif isinstance(message, protocol.Reset):
                    self._observe(message, self._episodes.reset)
                elif isinstance(message, protocol.StepEpisode):
                    self._observe(message, self._episodes.step)
                elif isinstance(message, protocol.CloseEpisode):
                    self._episodes.close(message.episode)
                elif isinstance(message, protocol.HelloRejected):
                    raise UserError(f"the service refuses this environment host: {message.reason}")
        finally:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)

    async def _send(self, message: protocol.Prompts | protocol.Observation) -> None:
        if self._link is None:
            return  # the controller asks again when the link is back
        message.epoch = self._epoch
        frame = protocol.encode(message)
        if len(frame) > protocol.MAX_FRAME:  # it would end the link, and be asked for again, without end
            most = f"at most {protocol.MAX_FRAME >> 20} MB can be sent; make prompts and messages shorter"
            frame = protocol.encode(_refused(message, f"the answer has {len(frame)} bytes, {most}"))
        with contextlib.suppress(ConnectionClosed):  # the reader sees it too, and reconnects
            await self._link.send(frame)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- prompts ------------------------------------------------------------------------------------------------------

    async def _prompts(self, message: protocol.GetPrompts) -> None:
        answer = protocol.Prompts(epoch=0, call=message.call)
        try:
            prototype = await self._prototype(message.environment, message.options)
            answer.prompts, answer.size = await self._calls(
                self._calls.threads(message.job),
                lambda: prototype.splits[message.split].take(
                    message.start, message.count, message.seed, message.shuffle, wrap=message.split == "train"
                ),
            )
        except Exception as error:  # a user's code ran
            log.warning("prompts of %s failed", message.environment, exc_info=error, extra={"job": message.job})
            answer.error = describe(error)
        await self._send(answer)

    async def _prototype(self, name: str, options: dict[str, Any]) -> _Prototype:
        key = (name, msgspec.msgpack.encode(options, order="deterministic"))
        task = self._prototypes.pop(key, None)
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(self._build(name, options))
        self._prototypes[key] = task  # last in the order: used most recently
        while len(self._prototypes) > MAX_PROTOTYPES:
            del self._prototypes[next(iter(self._prototypes))]
        return await asyncio.shield(task)

    async def _environment(self, name: str, options: dict[str, Any]) -> Environment:
        return (await self._prototype(name, options)).environment

    async def _build(self, name: str, options: dict[str, Any]) -> _Prototype:
        offer = self._offers.get(name)
        if offer is None:
            raise UserError(f"this host has no environment {name!r}; it has {', '.join(self._offers)}")
        if isinstance(offer, Environment) and options:
            raise UserError(f"environment {name!r} is an object and takes no options; given {', '.join(options)}")
        if isinstance(offer, Environment):
            environment = offer
        else:
            build: Callable[[], Environment] = (
                (lambda: offer(options)) if isinstance(offer, Builtin) else (lambda: offer(**options))
            )
            environment = await self._calls(self._calls.threads(f"build {name}"), build)
        return _Prototype(environment, {split: PromptDataset(environment, split) for split in ("train", "eval")})

    def _observe(
        self,
        message: protocol.Reset | protocol.StepEpisode,
        turn_of: Callable[[Any], asyncio.Task[protocol.Observation]],
    ) -> None:
        try:
            turn = turn_of(message)  # here, so that calls take effect in the order in which they came
        except UserError as error:
            refusal = protocol.Observation(epoch=0, call=message.call, episode=message.episode, error=str(error))
            self._spawn(self._send(refusal))
        else:
            self._spawn(self._answer(message.call, turn))

    async def _answer(self, call: str, turn: asyncio.Task[protocol.Observation]) -> None:
        await asyncio.wait([turn])
        if not turn.cancelled():  # else the episode was closed meanwhile
            await self._send(msgspec.structs.replace(turn.result(), call=call))

    async def _end(self) -> None:
        await self._episodes.end()
        left = [*self._tasks, *self._prototypes.values()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        self._calls.close()


def _refused(message: protocol.Prompts | protocol.Observation, error: str) -> protocol.Prompts | protocol.Observation:
    """An error in the place of an answer."""
    if isinstance(message, protocol.Prompts):
        return protocol.Prompts(epoch=message.epoch, call=message.call, error=error)
    return protocol.Observation(epoch=message.epoch, call=message.call, episode=message.episode, error=error)


def link_url(url: str, path: str) -> str:
    """The WebSocket address of ``path`` at a service's ``url`` (http, https, ws or wss)."""
    parts = urlsplit(url)
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if parts.scheme not in schemes or not parts.netloc:
        raise UserError(f"{url!r} is not a service's address; give one like http://127.0.0.1:7077")
    return urlunsplit((schemes[parts.scheme], parts.netloc, parts.path.rstrip("/") + path, "", ""))


async def _binary(link: ClientConnection) -> bytes:
    frame = await link.recv(decode=False)
    return bytes(frame)


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
