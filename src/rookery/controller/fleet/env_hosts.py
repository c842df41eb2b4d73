"""The connected environment hosts, and the episodes that run in them.

* A host is known by its ``instance``, drawn once per process. When its connection breaks, its episodes wait for the
  same instance; its unanswered calls are sent again, and a host answers a repeated call from memory, so nothing happens
  twice in an environment. The episodes of a paused job stay there until the job ends.
* An episode that is closed while its host is away is closed when the host reconnects, also to another process of the
  service: a host lists its live episodes in its hello, and is sent a close for those that will not continue.
* :class:`HostLost` is raised to an episode whose instance does not return in time, at once when another host offers
  the environment and either the environment is deterministic (the episode can be replayed there) or that host is the
  successor of the lost one.
* Every call has a deadline. A tenant's host serves that tenant only; built-ins come from the service's hosts, which get
  the calls of tenants in turns. The frame of a call is made when its turn comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import msgspec

from rookery import protocol
from rookery.aio import BackgroundTasks, Signal
from rookery.clock import Clock, IdGenerator
from rookery.controller.fleet.agents import Agents
from rookery.controller.indexed import IndexedDict
from rookery.errors import RookeryError, Unavailable, short, without_paths
from rookery.protocol.connection import Connection, Outbox, RegistrationRefused, check_protocol, serve_peer
from rookery.settings import Settings
from rookery.spec import values
from rookery.spec.job import BUILTIN, EnvironmentSpec
from rookery.storage.store import Writer
from rookery.turns import in_thread, loop_time_of

T = TypeVar("T")
A = TypeVar("A", protocol.Prompts, protocol.Observation)
EnvironmentMessage = protocol.GetPrompts | protocol.Reset | protocol.StepEpisode

log = logging.getLogger("rookery.controller.fleet.env_hosts")

SERVICE = ""
"""Owner of the hosts that the service spawns."""

LONGEST_ERROR = 2000
"""Characters of an environment's error that are kept: each episode that fails has one."""


class EnvironmentFailed(RookeryError):
    """The environment raised, returned an invalid answer, or none: this episode is over."""

    status = 422


class HostLost(Exception):
    """The host instance that runs an episode will not continue it."""

    def __init__(self, reason: str, deterministic: bool) -> None:
        super().__init__(reason)
        self.deterministic = deterministic


@dataclass(frozen=True)
class EnvironmentRef:
    """The environment of one job."""

    job: str
    """The job's id."""
    owner: str
    """Whose hosts may run it: the tenant's id, or :data:`SERVICE` for a built-in."""
    spec: EnvironmentSpec
    options: dict[str, Any]
    """A built-in's options, datasets resolved to paths."""
    tenant: str = ""
    """The job's tenant."""

    @property
    def name(self) -> str:
        """The name under which hosts offer it."""
        return self.spec.name

    def reset(self, episode: str, prompt: bytes, seed: int) -> protocol.Reset:
        """The first call of an episode; ``prompt`` is JSON."""
        return protocol.Reset(
            call="", episode=episode, job=self.job, environment=self.name, options=self.options, prompt=prompt,
            seed=seed, tenant=self.tenant,
        )  # fmt: skip

    def unknown_policy(self, name: str, turn: int, policies: Iterable[str]) -> str:
        """The line about a policy that it names in a turn and that is none of the job's ``policies``."""
        return f"{self.name} names the policy {short(repr(name))} in turn {turn}; the job has {', '.join(policies)}"

    def prompts(
        self, split: Literal["train", "eval"], start: int, count: int, *, seed: int, shuffle: bool,
        constant: bool = False,
    ) -> protocol.GetPrompts:  # fmt: skip
        """The call for so many prompts, or for the best ``constant`` reply on them."""
        return protocol.GetPrompts(
            call="", job=self.job, environment=self.name, options=self.options, split=split, start=start, count=count,
            seed=seed, shuffle=shuffle, constant=constant, tenant=self.tenant,
        )  # fmt: skip


@dataclass(eq=False)
class HostCall:
    """An unanswered call."""

    job: str
    since: float
    """When it was sent, or its method began (seconds of the loop)."""
    answer: asyncio.Future[Any]
    """None: the connection ended."""
    payer: str = ""
    """The tenant whose work it is, where a host of the service has it: that of a tenant's host is the tenant's."""
    queued: bool = False
    """Its method waits for a thread of the host."""

    def deadline(self, timeout: float, active: float) -> float:
        """When it has taken too long; ``active``: when another call of the job ended last. One that waits for a thread
        has the time of those that have them."""
        return max(self.since, active if self.queued else self.since) + timeout


class OpenEpisode(NamedTuple):
    """An episode that may continue in a host."""

    name: str
    job: str
    tenant: str | None = None
    """The job's tenant, once this process has called the episode in that host: no other host continues it."""


@dataclass(eq=False)
class EnvironmentHost:
    """One host process. While it is not ``connected``, its episodes and calls wait for it to reconnect."""

    owner: str
    hello: protocol.HostHello
    outbox: Outbox
    joined: float
    """When it first connected (monotonic seconds)."""
    connected: bool = True
    left: float = 0.0
    """When its connection ended."""
    episodes: IndexedDict[str, OpenEpisode] = field(default_factory=lambda: IndexedDict(job=attrgetter("job")))
    """By name; a host that reconnects is sent a close for any other."""
    calls: IndexedDict[str, HostCall] = field(default_factory=lambda: IndexedDict(job=attrgetter("job")))
    """Unanswered calls."""
    active: dict[str, float] = field(default_factory=dict)
    """By job with unanswered calls, when a call began or was answered last (seconds of the loop)."""

    def offers(self, owner: str, environment: str) -> bool:
        """Whether it may run an environment of this name now."""
        named = any(offer.name == environment for offer in self.hello.environments)
        return named and self.connected and self.owner == owner

    def runs(self, episode: str) -> bool:
        """Whether this process has called the episode there."""
        known = self.episodes.get(episode)
        return known is not None and known.tenant is not None

    def deterministic(self, environment: str) -> bool:
        return any(offer.name == environment and offer.deterministic for offer in self.hello.environments)

    def runs_agent(self, environment: str) -> bool:
        """Whether its episodes are driven by an agent."""
        return any(offer.name == environment and offer.agent for offer in self.hello.environments)

    def interrupt(self) -> None:
        """The connection ended: its calls must be sent again."""
        for call in self.calls.values():
            if not call.answer.done():
                call.answer.set_result(None)


ModelAnswer = Callable[[protocol.AskModel], Awaitable[protocol.ModelReply]]
"""The answer of a model to a host's question; it does not raise."""


class EnvironmentHosts:
    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        ids: IdGenerator,
        unfinished: Callable[[str], Awaitable[Collection[str]]],
        agents: Agents,
        threads: Writer = in_thread,
    ) -> None:
        """``unfinished(owner)`` returns the owner's jobs that have not ended, including paused ones; those of all
        tenants for :data:`SERVICE`. ``threads`` run checks of prompts."""
        self._settings = settings
        self._clock = clock
        self._ids = ids
        self._unfinished = unfinished
        self._threads = threads
        self._questions: set[asyncio.Task[None]] = set()
        self._closing = BackgroundTasks()
        self.agents = agents
        """The agents that drive episodes, in hosts or elsewhere."""
        self.hosts: IndexedDict[tuple[str, str], EnvironmentHost] = IndexedDict(owner=lambda host: host.owner)
        """By owner and instance."""
        self._failure = ""
        """Why the service's host does not work, for tenants, until one connects."""
        self._epoch = int(clock.time() * 1000)
        self._changed: WeakValueDictionary[str, Signal] = WeakValueDictionary()
        """By owner, while somebody waits for a host: notified when one of the owner's comes or goes."""

    # --- connections --------------------------------------------------------------------------------------------------

    async def serve(self, connection: Connection, owner: str, answer: ModelAnswer) -> None:
        """Serve one host of ``owner`` until its connection ends; ``answer`` asks a model for a host of the service."""
        await serve_peer(
            connection,
            protocol.from_host,
            register=partial(self._register, owner),
            deliver=partial(self._deliver, answer),
            bad_frame=self._bad_frame,
            closed=self._closed,
        )

    async def _register(self, owner: str, hello: Any, connection: Connection) -> EnvironmentHost:
        self._check(owner, hello)
        continuing = await self._continuing(owner, hello)
        host = self.hosts.get((owner, hello.instance))
        self._epoch += 1
        outbox = Outbox(connection, self._epoch, self._clock)
        if host is None:
            host = self.hosts[owner, hello.instance] = EnvironmentHost(owner, hello, outbox, self._clock.monotonic())
            host.episodes.update({episode.name: episode for episode in continuing})
        else:
            host.hello, host.outbox, host.connected = hello, outbox, True
            host.interrupt()
        seconds, most = self._settings.worker.heartbeat_seconds, self._settings.edge.host_bytes if owner else 0
        outbox.post(protocol.HostWelcome(epoch=self._epoch, heartbeat_seconds=seconds, max_bytes=most))
        for episode in hello.episodes:
            if episode not in host.episodes:
                self.close_episode(host, episode)
        if owner == SERVICE:
            self._failure = ""
        offered = ", ".join(offer.name for offer in hello.environments)
        log.info("environment host %s offers %s", short(hello.instance), short(offered), extra={"tenant": owner})
        self._notify(owner)
        return host

    @staticmethod
    def _bad_frame(host: EnvironmentHost | None, error: protocol.BadFrame) -> None:
        name, owner = (short(host.hello.instance), host.owner) if host is not None else ("?", "")
        log.warning("environment host %s sent a bad frame: %s", name, error, extra={"tenant": owner})

    async def _closed(self, host: EnvironmentHost, connection: Connection) -> None:
        if host.outbox.connection is connection and host.connected:
            host.connected = False
            host.left = self._clock.monotonic()
            host.interrupt()
            log.info("environment host %s left", short(host.hello.instance), extra={"tenant": host.owner})
            away = [other for other in self.hosts.of(owner=host.owner) if not other.connected]
            if host.owner and len(away) > self._settings.limits.tenant_hosts:  # whatever episodes it said it had
                first = min(away, key=lambda other: other.left)
                del self.hosts[first.owner, first.hello.instance]
            self._notify(host.owner)

    def _notify(self, owner: str) -> None:
        """Wake the episodes that wait for a host of this owner."""
        if (changed := self._changed.get(owner)) is not None:
            changed.notify()

    async def _continuing(self, owner: str, hello: protocol.HostHello) -> set[OpenEpisode]:
        """The episodes that a host has from before this process, of its owner's jobs that have not ended. Nothing is
        awaited between this answer and the host's registration, so that a job which ends finds them there."""
        if not hello.episodes or (owner, hello.instance) in self.hosts:
            return set()
        unfinished = set(await self._unfinished(owner))
        lengths, named = {len(job) for job in unfinished}, hello.episodes
        known = [OpenEpisode(name, job) for name in named if (job := _job_of(name, unfinished, lengths)) is not None]
        others = [host for one in {owner, SERVICE} for host in self.hosts.of(owner=one)]
        return {episode for episode in known if not any(host.runs(episode.name) for host in others)}

    @staticmethod
    def _check(owner: str, hello: Any) -> None:
        """Raises :class:`RegistrationRefused`."""
        check_protocol(hello, protocol.HostHello)
        if owner != SERVICE and any(offer.name.startswith(BUILTIN) for offer in hello.environments):
            raise RegistrationRefused(f"names that begin with {BUILTIN} belong to the service")

    def _deliver(self, answer: ModelAnswer, host: EnvironmentHost, message: Any, seconds: float) -> None:
        if isinstance(message, protocol.HostHello) or message.epoch != host.outbox.epoch:
            return
        host.outbox.last_frame = self._clock.monotonic()
        if isinstance(message, protocol.Prompts | protocol.Observation):
            call = host.calls.get(message.call)
            if call is not None and not call.answer.done():
                with loop_time_of(call.payer, seconds):
                    host.active[call.job] = asyncio.get_running_loop().time()
                    call.answer.set_result(message)
        elif isinstance(message, protocol.CallQueued):
            if (call := host.calls.get(message.call)) is not None:
                call.queued, call.since = message.queued, asyncio.get_running_loop().time()
                host.active[call.job] = max(host.active.get(call.job, 0.0), 0.0 if message.queued else call.since)
        elif isinstance(message, protocol.AgentStarted):
            self.agents.begin(host.owner, message.episode)
        elif isinstance(message, protocol.AskModel) and host.owner == SERVICE:  # which names the jobs of all tenants
            task = asyncio.create_task(self._ask_model(answer, host, message))
            self._questions.add(task)
            task.add_done_callback(self._questions.discard)

    async def _ask_model(self, answer: ModelAnswer, host: EnvironmentHost, question: protocol.AskModel) -> None:
        outbox = host.outbox
        reply = await answer(question)
        if host.outbox is outbox and host.connected:  # else the host asks again
            outbox.post(reply)

    async def watch(self) -> None:
        """Close connections of silent hosts and remove those that stay away, until cancelled."""
        limits = self._settings.worker
        while True:
            await self._clock.sleep(limits.heartbeat_seconds)
            now = self._clock.monotonic()
            for host in list(self.hosts.values()):
                if host.connected:
                    if reason := host.outbox.problem(limits.suspect_seconds):
                        self._closing.start(host.outbox.connection.close(reason))  # it may hang in closing, too
                elif not host.episodes and now - host.left > limits.rejoin_seconds:
                    del self.hosts[host.owner, host.hello.instance]

    def connected(self, owner: str, environment: str) -> bool:
        """Whether a host of this owner offers an environment of this name now."""
        return any(host.offers(owner, environment) for host in self.hosts.of(owner=owner))

    def fail(self, reason: str) -> None:
        """The process of the service's host does not work, for this ``reason``."""
        self._failure = without_paths(reason)

    def count(self) -> int:
        return sum(host.connected for host in self.hosts.values())

    # --- calls --------------------------------------------------------------------------------------------------------

    async def host_for(self, environment: EnvironmentRef, timeout: float | None = None) -> EnvironmentHost:
        """The host with the fewest episodes that offers the environment, within its ``return_timeout`` or ``timeout``.
        Raises :class:`Unavailable`."""
        timeout = environment.spec.return_timeout if timeout is None else timeout
        if able := await self._wait(environment, lambda: self._able(environment), timeout):
            return min(able, key=lambda host: (len(host.episodes), host.joined))
        waited = f": waited {timeout:.0f} s for one" if timeout else ""
        reason = f" ({self._failure})" if self._failure and environment.owner == SERVICE else ""
        raise Unavailable(f"no environment host offers {environment.name.removeprefix(BUILTIN)!r}{waited}{reason}")

    async def holder(self, environment: EnvironmentRef, instance: str) -> EnvironmentHost:
        """The host that runs an episode, connected or not. When this process does not know it yet: waits until it
        connects, or any host that can replay the episode, or the timeout. Raises :class:`Unavailable`."""

        def found() -> EnvironmentHost | None:
            if (known := self.hosts.get((environment.owner, instance))) is not None:
                return known
            return next((host for host in self._able(environment) if host.deterministic(environment.name)), None)

        waited = await self._wait(environment, found, environment.spec.return_timeout)
        return waited or await self.host_for(environment, 0)

    def _able(self, environment: EnvironmentRef) -> list[EnvironmentHost]:
        hosts = self.hosts.of(owner=environment.owner)
        return [host for host in hosts if host.offers(environment.owner, environment.name)]

    async def _wait(self, environment: EnvironmentRef, find: Callable[[], T], timeout: float) -> T:
        """``find()`` as soon as a host of the environment's owner makes it true, or after the timeout."""
        changed = self._changed.setdefault(environment.owner, Signal())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not find():
                    await changed.next.wait()
        return find()

    async def split(
        self, environment: EnvironmentRef, split: Literal["train", "eval"], start: int, count: int, *, seed: int,
        shuffle: bool,
    ) -> protocol.Prompts:  # fmt: skip
        """``count`` prompts, each as JSON, from number ``start`` on in the order of ``seed``: from any host that offers
        the environment, from another one when the first leaves."""
        call = environment.prompts(split, start, count, seed=seed, shuffle=shuffle)
        host, answer = await self._ask(environment, call)
        if host.owner:
            most = self._settings.limits.row_bytes
            if any(len(prompt) > most for prompt in answer.prompts):
                raise EnvironmentFailed(f"prompts({split!r}): a prompt has more than {most} bytes (ROOKERY_ROW_BYTES)")
            if problem := await self._threads(_problem, answer.prompts):
                raise EnvironmentFailed(f"prompts({split!r}): {problem}")
        answer.prompts = answer.prompts[:count]
        return answer

    async def best_constants(
        self, environment: EnvironmentRef, policies: Sequence[str], split: Literal["train", "eval"], count: int, *,
        seed: int, shuffle: bool,
    ) -> dict[str, protocol.BestConstant]:  # fmt: skip
        """By name, the fixed reply of each of a job's ``policies`` that earns most on the first ``count`` prompts, as
        far as the environment knows one."""
        call = environment.prompts(split, 0, count, seed=seed, shuffle=shuffle, constant=True)
        _, answer = await self._ask(environment, call)
        found = {name or policies[0]: constant for name, constant in answer.constants.items()}
        for name, constant in found.items():
            if name not in policies:
                known = ", ".join(policies)
                raise EnvironmentFailed(f"best_constant names the policy {short(repr(name))}; the job has {known}")
            if not math.isfinite(constant.reward):
                raise EnvironmentFailed(f"best_constant gives the reward {constant.reward}, not a finite number")
        return found

    async def _ask(
        self, environment: EnvironmentRef, message: protocol.GetPrompts
    ) -> tuple[EnvironmentHost, protocol.Prompts]:
        """The answer of any host that offers the environment; of another one when the first leaves."""
        while True:
            host = await self.host_for(environment)
            try:
                answer = await self._call(host, environment, message, protocol.Prompts)
            except HostLost:
                continue
            if answer.error:
                call = "best_constant" if message.constant else f"prompts({message.split!r})"
                raise EnvironmentFailed(f"{call}: {answer.error[:LONGEST_ERROR]}")
            return host, answer

    async def observe(
        self, host: EnvironmentHost, environment: EnvironmentRef, message: protocol.Reset | protocol.StepEpisode,
        *, limited: bool = True,
    ) -> protocol.Observation:  # fmt: skip
        """The answer of the episode's environment, within its ``step_timeout`` if ``limited``. Raises
        :class:`EnvironmentFailed` or :class:`HostLost`."""
        if not host.runs(message.episode):
            for other in self.hosts.of(owner=host.owner):  # it has a copy from before this process
                if other is not host and message.episode in other.episodes:
                    self.close_episode(other, message.episode)
        host.episodes[message.episode] = OpenEpisode(message.episode, environment.job, environment.tenant)
        answer = await self._call(host, environment, message, protocol.Observation, limited=limited)
        if answer.error:
            raise EnvironmentFailed(answer.error[:LONGEST_ERROR])
        return answer

    def close_episode(self, host: EnvironmentHost, episode: str) -> None:
        known = host.episodes.pop(episode, None)
        if host.connected:
            tenant = known.tenant if known is not None else None
            host.outbox.post(protocol.CloseEpisode(episode=episode), tenant)  # behind its calls

    def close_job(self, job: str) -> None:
        """The job has ended: close the episodes that its hosts still run."""
        for host in self.hosts.values():
            for episode in sorted(host.episodes.of(job=job)):
                self.close_episode(host, episode.name)

    async def _call(
        self,
        host: EnvironmentHost,
        environment: EnvironmentRef,
        message: EnvironmentMessage,
        expected: type[A],
        *,
        limited: bool = True,
    ) -> A:
        message = msgspec.structs.replace(message, call=self._ids.new("call"))
        kind = _kind(message)
        timeout = environment.spec.step_timeout if limited else None
        try:
            while True:
                await self._reconnected(host, environment)
                loop = asyncio.get_running_loop()
                payer = environment.tenant if host.owner == SERVICE else ""
                call = HostCall(environment.job, loop.time(), loop.create_future(), payer)
                host.calls[message.call] = call
                await self._send(host, environment.tenant, message, call)
                answer = await self._answered(host, call, kind, timeout)
                if isinstance(answer, expected):
                    return answer
                if answer is not None:
                    raise EnvironmentFailed(f"{kind} was answered with {type(answer).__name__}: the host is faulty")
        finally:
            host.calls.pop(message.call, None)
            if not host.calls.has(job=environment.job):
                host.active.pop(environment.job, None)

    @staticmethod
    async def _send(host: EnvironmentHost, tenant: str, message: EnvironmentMessage, call: HostCall) -> None:
        """Send a call in its tenant's turn; its time counts from then on. Returns where the connection ends before.
        Raises :class:`EnvironmentFailed` for one that no host accepts: it would close the connection, which carries all
        calls."""
        sent = host.outbox.offer(message, tenant)
        try:
            await asyncio.wait([sent, call.answer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            sent.cancel()
        if sent.cancelled():
            return
        try:
            sent.result()
        except protocol.FrameTooLarge as large:
            limit = f"at most {protocol.MAX_FRAME >> 20} MB can be sent to a host; make prompts and messages shorter"
            raise EnvironmentFailed(f"{_kind(message)} has {large.size} bytes, {limit}") from None
        except (OverflowError, TypeError, ValueError) as error:
            raise EnvironmentFailed(f"{_kind(message)} has a value that cannot be sent to a host: {error}") from error
        call.since = asyncio.get_running_loop().time()

    @staticmethod
    async def _answered(host: EnvironmentHost, call: HostCall, kind: str, timeout: float | None) -> Any:
        """The answer within ``timeout``. Raises :class:`EnvironmentFailed`."""
        if timeout is None:
            return await call.answer
        left = timeout
        while left > 0 and not (await asyncio.wait([call.answer], timeout=left))[0]:
            left = call.deadline(timeout, host.active.get(call.job, 0.0)) - asyncio.get_running_loop().time()
        if call.answer.done():
            return call.answer.result()
        if call.queued:
            raise EnvironmentFailed(
                f"{kind} waited {timeout:g} s for a thread of its host, while no other call of the job ended; end"
                " methods that do not return, or make them async"
            )
        raise EnvironmentFailed(f"{kind} was not answered within {timeout:g} s")

    async def _reconnected(self, host: EnvironmentHost, environment: EnvironmentRef) -> None:
        """Return when ``host`` is connected. Raises :class:`HostLost` when it does not reconnect."""
        deterministic, timeout = host.deterministic(environment.name), environment.spec.return_timeout

        def replaced() -> bool:
            return any(deterministic or other.joined > host.left for other in self._able(environment))

        if not await self._wait(environment, lambda: host.connected or replaced(), timeout):
            raise HostLost(f"its environment host did not reconnect within {timeout:g} s", deterministic)
        if not host.connected:
            raise HostLost("its environment host left", deterministic)


def _job_of(episode: str, jobs: Collection[str], lengths: Collection[int]) -> str | None:
    """The one of ``jobs``, whose names have these ``lengths``, that an episode belongs to: its name is
    JOB-GROUP-MEMBER, or JOB-eVERSION-NUMBER and more parts where it evaluates."""
    names = (episode[:length] for length in lengths if episode[length : length + 1] == "-")
    return next((name for name in names if name in jobs), None)


def _kind(message: EnvironmentMessage) -> str:
    return type(message).__name__.removesuffix("Episode").lower()


def _problem(prompts: Iterable[bytes]) -> str:
    """Why one of a tenant's prompts cannot be used; empty if all can."""
    for number, prompt in enumerate(prompts):
        try:
            values.decode(prompt)
        except ValueError as error:
            return f"prompt {number} of the answer: {error}"
    return ""
