"""The environment hosts that dialled in, and the episodes that run in them.

* A host is known by its ``instance``, drawn once per process. When its connection breaks, its episodes wait for the
  same instance; its outstanding calls are sent again, and a host answers a call that it has already carried out from
  memory, so nothing happens twice in an environment. A job that rests keeps its episodes there until it ends.
* An episode that is closed while its host is away is closed there when the host comes back, also to another process of
  the service: a host says which episodes it still has, and hears which of them nobody will go on with.
* :class:`HostLost` is raised to an episode whose instance does not come back in time, at once when another host offers
  the environment and either the environment is deterministic (the episode can be replayed there) or that host is the
  successor of the lost one.
* Every call has a deadline. A tenant's host serves that tenant only; built-ins come from the service's own hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rookery import protocol
from rookery.aio import Clock, IdGenerator
from rookery.errors import RookeryError, Unavailable
from rookery.protocol.connection import Connection, ConnectionClosed
from rookery.settings import Settings

log = logging.getLogger("rookery.controller.fleet.env_hosts")

HELLO_SECONDS = 30.0
"""A connection that has not said hello by then is closed."""

SERVICE = ""
"""Owner of the hosts that the service spawned."""

BUILTIN = "builtin:"


class EnvironmentFailed(RookeryError):
    """The environment raised, answered nonsense, or not at all: this episode is over."""

    status = 422


class HostLost(Exception):
    """The host instance that held an episode will not go on with it."""

    def __init__(self, reason: str, deterministic: bool) -> None:
        super().__init__(reason)
        self.deterministic = deterministic


@dataclass(eq=False)
class EnvironmentHost:
    owner: str
    hello: protocol.HostHello
    epoch: int
    connection: Connection
    joined: float
    last_beat: float
    connected: bool = True
    left: float = 0.0
    episodes: set[str] = field(default_factory=set)
    """Those that may be gone on with there; the host may still have others, which it hears of when it is back."""
    calls: dict[str, asyncio.Future[Any]] = field(default_factory=dict)
    """Calls without an answer; None is answered for a connection that ended."""
    outbox: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)

    def offers(self, owner: str, environment: str) -> bool:
        return self.owner == owner and any(offer.name == environment for offer in self.hello.environments)

    def deterministic(self, environment: str) -> bool:
        return any(offer.name == environment and offer.deterministic for offer in self.hello.environments)

    def interrupt(self) -> None:
        """The connection is over: what was sent on it has to be sent again."""
        for future in self.calls.values():
            if not future.done():
                future.set_result(None)


class EnvironmentHosts:
    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        ids: IdGenerator,
        authenticate: Callable[[str], Awaitable[str | None]],
        unfinished: Callable[[], Awaitable[Collection[str]]],
    ) -> None:
        """``authenticate(token)`` answers the tenant, :data:`SERVICE` for the service's own token, None for neither;
        ``unfinished()`` the jobs that have not ended, those that rest included."""
        self._settings = settings
        self._clock = clock
        self._ids = ids
        self._authenticate = authenticate
        self._unfinished = unfinished
        self._hosts: dict[str, EnvironmentHost] = {}
        self._epoch = int(clock.time() * 1000)
        self._change = asyncio.Condition()

    # --- connections --------------------------------------------------------------------------------------------------

    async def serve(self, link: Connection) -> None:
        """Speak with one host until its connection is over."""
        host = None
        writer = None
        try:
            host = await self._greet(link)
            if host is None:
                return
            writer = asyncio.create_task(self._write(link, host.outbox))
            while True:
                self._deliver(host, protocol.decode(protocol.from_host, await link.receive()))
        except (ConnectionClosed, TimeoutError):
            pass
        except protocol.BadFrame as error:
            name, owner = (host.hello.instance, host.owner) if host else ("?", "")
            log.warning("environment host %s sent a bad frame: %s", name, error, extra={"tenant": owner})
        finally:
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)
            await link.close("bye")
            if host is not None and host.connection is link and host.connected:
                host.connected = False
                host.left = self._clock.monotonic()
                host.interrupt()
                log.info("environment host %s left", host.hello.instance, extra={"tenant": host.owner})
                async with self._change:
                    self._change.notify_all()

    @staticmethod
    async def _write(link: Connection, outbox: asyncio.Queue[bytes]) -> None:
        with contextlib.suppress(ConnectionClosed):  # the reader of the same link hears of it
            while True:
                await link.send(await outbox.get())

    async def _greet(self, link: Connection) -> EnvironmentHost | None:
        async with asyncio.timeout(HELLO_SECONDS):
            hello = protocol.decode(protocol.from_host, await link.receive())
        owner, reason = await self._check(hello)
        if reason or owner is None:
            await link.send(protocol.encode(protocol.HelloRejected(reason=reason)))
            return None
        assert isinstance(hello, protocol.HostHello)
        wanted = await self._wanted(hello)
        known = self._hosts.get(hello.instance)
        if known is not None and known.owner != owner:
            await link.send(protocol.encode(protocol.HelloRejected(reason="this instance name is taken")))
            return None
        self._epoch += 1
        now = self._clock.monotonic()
        if known is None:
            known = EnvironmentHost(owner, hello, self._epoch, link, joined=now, last_beat=now, episodes=wanted)
            self._hosts[hello.instance] = known
        else:
            known.hello, known.epoch, known.connection, known.last_beat = hello, self._epoch, link, now
            known.outbox = asyncio.Queue()
            known.interrupt()
        known.connected = True
        welcome = protocol.HostWelcome(epoch=self._epoch, heartbeat_seconds=self._settings.worker.heartbeat_seconds)
        known.outbox.put_nowait(protocol.encode(welcome))
        for episode in hello.episodes:
            if episode not in known.episodes:
                self.close_episode(known, episode)
        offered = ", ".join(offer.name for offer in hello.environments)
        log.info("environment host %s offers %s", hello.instance, offered, extra={"tenant": owner})
        async with self._change:
            self._change.notify_all()
        return known

    async def _wanted(self, hello: protocol.HostHello) -> set[str]:
        """Of the episodes that a host brings along from before this process, those that may be gone on with: their
        jobs have not ended. Nothing is awaited from this answer until the host is known, so that a job which ends
        finds them there."""
        if not hello.episodes or hello.instance in self._hosts:
            return set()
        unfinished = set(await self._unfinished())
        return {name for name in hello.episodes if name.rsplit("-", 2)[0] in unfinished}  # JOB-GROUP-MEMBER

    async def _check(self, hello: Any) -> tuple[str | None, str]:
        if not isinstance(hello, protocol.HostHello):
            return None, "the first frame is a HostHello"
        if hello.protocol != protocol.PROTOCOL:
            return (
                None,
                f"protocol {hello.protocol} is not spoken here ({protocol.PROTOCOL} is): use the service's version",
            )
        owner = await self._authenticate(hello.token)
        if owner is None:
            return None, "the key is not known to this service"
        if owner != SERVICE and any(offer.name.startswith(BUILTIN) for offer in hello.environments):
            return None, f"names that begin with {BUILTIN} belong to the service"
        return owner, ""

    def _deliver(self, host: EnvironmentHost, message: Any) -> None:
        if isinstance(message, protocol.HostHello) or message.epoch != host.epoch:
            return
        host.last_beat = self._clock.monotonic()
        if isinstance(message, protocol.Prompts | protocol.Observation):
            future = host.calls.get(message.call)
            if future is not None and not future.done():
                future.set_result(message)

    async def watch(self) -> None:
        """Close connections whose host has gone silent, for ever."""
        while True:
            await self._clock.sleep(self._settings.worker.heartbeat_seconds)
            now = self._clock.monotonic()
            for host in list(self._hosts.values()):
                if host.connected and now - host.last_beat > self._settings.worker.suspect_seconds:
                    await host.connection.close("no heartbeat")
                elif (
                    not host.connected and not host.episodes and now - host.left > self._settings.worker.rejoin_seconds
                ):
                    del self._hosts[host.hello.instance]

    def offers(self, owner: str, environment: str) -> bool:
        return any(host.connected and host.offers(owner, environment) for host in self._hosts.values())

    def count(self) -> int:
        return sum(host.connected for host in self._hosts.values())

    # --- calls --------------------------------------------------------------------------------------------------------

    async def host_for(self, owner: str, environment: str, timeout: float) -> EnvironmentHost:
        """The connected host with the fewest episodes that offers ``environment``. Raises :class:`Unavailable`."""

        def able() -> list[EnvironmentHost]:
            return [host for host in self._hosts.values() if host.connected and host.offers(owner, environment)]

        try:
            async with asyncio.timeout(timeout), self._change:
                await self._change.wait_for(lambda: bool(able()))
                return min(able(), key=lambda host: (len(host.episodes), host.joined))
        except TimeoutError:
            shown = environment.removeprefix(BUILTIN)
            waited = f": waited {timeout:.0f} s for one" if timeout else ""
            raise Unavailable(f"no environment host offers {shown!r}{waited}") from None

    async def holder(self, owner: str, environment: str, instance: str, timeout: float) -> EnvironmentHost:
        """The host that holds an episode, connected or not. When this process has not heard of it: once it dials in, or
        any host that can replay the episode does, or the time is over. Raises :class:`Unavailable`."""

        def found() -> EnvironmentHost | None:
            known = self._hosts.get(instance)
            if known is not None and known.owner == owner:
                return known
            able = (host for host in self._hosts.values() if host.connected and host.offers(owner, environment))
            return next((host for host in able if host.deterministic(environment)), None)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._change:
                await self._change.wait_for(lambda: found() is not None)
        return found() or await self.host_for(owner, environment, 0)

    async def prompts(
        self, owner: str, environment: str, message: protocol.GetPrompts, *, timeout: float, return_timeout: float
    ) -> protocol.Prompts:
        """Prompts from any host that offers the environment; another one is asked when the first goes away."""
        while True:
            host = await self.host_for(owner, environment, return_timeout)
            try:
                answer = await self._call(host, environment, message, timeout, return_timeout)
            except HostLost:
                continue
            assert isinstance(answer, protocol.Prompts)
            if answer.error:
                raise EnvironmentFailed(f"prompts({message.split!r}): {answer.error}")
            return answer

    async def observe(
        self,
        host: EnvironmentHost,
        environment: str,
        message: protocol.Reset | protocol.StepEpisode,
        *,
        timeout: float,
        return_timeout: float,
    ) -> protocol.Observation:
        """What the episode's environment answers. Raises :class:`EnvironmentFailed` or :class:`HostLost`."""
        host.episodes.add(message.episode)
        answer = await self._call(host, environment, message, timeout, return_timeout)
        assert isinstance(answer, protocol.Observation)
        if answer.error:
            raise EnvironmentFailed(answer.error)
        return answer

    def close_episode(self, host: EnvironmentHost, episode: str) -> None:
        host.episodes.discard(episode)
        if host.connected:
            host.outbox.put_nowait(protocol.encode(protocol.CloseEpisode(episode=episode)))

    def close_job(self, job: str) -> None:
        """The job has ended: so have the episodes that its hosts still keep."""
        for host in self._hosts.values():
            for episode in sorted(name for name in host.episodes if name.startswith(f"{job}-")):
                self.close_episode(host, episode)

    async def _call(
        self,
        host: EnvironmentHost,
        environment: str,
        message: protocol.GetPrompts | protocol.Reset | protocol.StepEpisode,
        timeout: float,
        return_timeout: float,
    ) -> Any:
        message = msgspec.structs.replace(message, call=self._ids.new("call"))
        what = type(message).__name__.removesuffix("Episode").lower()
        frame = protocol.encode(message)
        if len(frame) > protocol.MAX_FRAME:  # the host would end the link, and with it everybody's calls
            most = f"at most {protocol.MAX_FRAME >> 20} MB can be sent to a host; make prompts and messages shorter"
            raise EnvironmentFailed(f"{what} has {len(frame)} bytes, {most}")
        try:
            while True:
                await self._back(host, environment, return_timeout)
                future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                host.calls[message.call] = future
                host.outbox.put_nowait(frame)
                try:
                    async with asyncio.timeout(timeout):
                        answer = await future
                except TimeoutError:
                    raise EnvironmentFailed(f"{what} was not answered within {timeout:g} s") from None
                if answer is not None:
                    return answer
        finally:
            host.calls.pop(message.call, None)

    async def _back(self, host: EnvironmentHost, environment: str, timeout: float) -> None:
        """Until ``host`` is connected. Raises :class:`HostLost` when it will not be."""
        if host.connected:
            return
        deterministic = host.deterministic(environment)

        def replaced() -> bool:
            others = [h for h in self._hosts.values() if h.connected and h.offers(host.owner, environment)]
            return any(deterministic or other.joined > host.left for other in others)

        try:
            async with asyncio.timeout(timeout), self._change:
                await self._change.wait_for(lambda: host.connected or replaced())
        except TimeoutError:
            raise HostLost(f"its environment host did not come back within {timeout:g} s", deterministic) from None
        if not host.connected:
            raise HostLost("its environment host went away", deterministic)
