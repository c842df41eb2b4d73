"""The agents at work: processes that drive an episode by calling its model, each with a key for that episode alone.

* A session is live while its episode runs. ``waiting``: a process with the tenant's key is to open it; ``running``: an
  agent has its key; ``ended``: nothing more of it counts, and its job takes its end up; ``stored``: that is durable;
  ``left``: it will not be in this run of the job.
* A key opens its session's addresses and nothing else. It is known by its hash, and stored with the episode: an agent
  continues with it when the service has restarted.
* Nothing waits without end: an agent that makes no call for the time of a step, and a job whose episodes no process
  opens, end with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from cachetools import LRUCache, TTLCache

from rookery.aio import Signal, wait_event
from rookery.clock import Clock
from rookery.controller.indexed import IndexedDict
from rookery.errors import Conflict, NotFound, RookeryError, Unauthorized, Unavailable, count_of
from rookery.storage.data_dir import hash_key
from rookery.storage.repositories.jobs import EpisodeStanding

KEY_PREFIX = "tml-ep-"
"""Beginning of an agent's key."""

KEY_BYTES = 24
"""Random bytes of a key: nobody guesses 192 bits."""

KEYS_KEPT = 4
"""Keys of one episode that are valid: the first one, which an agent keeps that lives through restarts and pauses, and
the newest ones."""

AWAY_SECONDS = 8.0
"""Time after which an agent repeats a call to an episode that does not run now: as long as the longest pause of
OpenAI's client, which a header of the response replaces."""

ENDED_SECONDS = 3600.0
"""Time for which a late call to an evaluation's episode, which is not stored, learns that it has ended."""

ENDED_SESSIONS = 20_000
"""Ended sessions of evaluations that are known at once: some ten megabytes."""

ASKED_JOBS = 20_000
"""Jobs of which it is known when a process asked for an episode last."""

State = Literal["waiting", "running", "ended", "stored", "left"]
Event = Literal["opened", "returned", "called", "finished", "failed", "closed", "stored", "left"]

OVER: tuple[State, ...] = ("ended", "stored", "left")
"""States of a session of which nothing more counts."""

TRANSITIONS: dict[tuple[State, Event], State] = {
    ("waiting", "opened"): "running",
    ("waiting", "closed"): "ended",
    ("running", "opened"): "running",  # its host is given it again
    ("running", "returned"): "waiting",  # the process that was to open it is gone
    ("running", "called"): "running",
    ("running", "finished"): "ended",
    ("running", "failed"): "ended",
    ("running", "closed"): "ended",
    ("ended", "closed"): "ended",
    ("ended", "stored"): "stored",  # the end of the episode is durable; of a held-out one, the job counts its result
    ("ended", "left"): "left",  # its job runs it no more, and its end is not durable
    ("stored", "left"): "stored",
}
"""The state that follows each event. There are no others: an event that has none is refused with the session's end."""


class EpisodeEnded(RookeryError):
    """The agent's episode is over: no call of it counts any more, and repeating it does not help."""

    status = 410


class EpisodeAway(Unavailable):
    """The agent's episode does not run now, and continues when its job does. A job that an outage paused is tried again
    after half a minute: a client that obeys ``Retry-After`` repeats its calls until then."""

    retry_after = AWAY_SECONDS


class AgentFailed(RookeryError):
    """The agent did not bring its episode to an end; one line with the reason."""


@dataclass(frozen=True)
class AgentOutcome:
    """The reward and metrics of an agent's work."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)
    """By policy, in addition."""


@dataclass(eq=False)
class AgentSession:
    """One attempt of an agent at an episode."""

    id: str
    """The episode's."""
    job: str
    tenant: str
    split: Literal["train", "eval"]
    prompt: bytes
    """The task, as JSON."""
    seed: int
    policies: Sequence[str]
    sampler: Any
    """Samples its calls: :class:`~rookery.controller.jobs.agent_calls.AgentCalls`."""
    save: Callable[[str], Awaitable[object]]
    """Stores the hashes of its keys."""
    clock: Clock
    keys: list[str] = field(default_factory=list)
    """Hashes."""
    hosted: bool = False
    """Its agent runs in an environment host, which reports its start and its end."""
    state: State = "waiting"
    ended_by: Event | Literal[""] = ""
    """The event that ended it."""
    changed: Signal = field(default_factory=Signal)
    """Notified when its state changes."""
    failure: str = ""
    """Why the job counts the episode as failed; once it is ``stored``."""
    result: AgentOutcome | str | None = None
    """How its agent ended it: a text is the reason why it failed."""
    since: float = 0.0
    """When its last call ended (monotonic seconds)."""
    calls: int = 0
    """Calls that run."""
    begun: bool = False
    """Its agent runs; a plain one in a host may wait for a thread first."""
    calls_refused: Counter[str] = field(default_factory=Counter)
    """Refused calls by their reason."""

    def __post_init__(self) -> None:
        self.since = self.clock.monotonic()
        self.begun = not self.hosted
        if self.keys:
            self.state = "running"

    def advance(self, event: Event) -> None:
        """Raises :class:`EpisodeEnded` for an event that its state does not have."""
        state = TRANSITIONS.get((self.state, event))
        if state is None:
            raise self.refusal() if self.state in OVER else Conflict(f"episode {self.id} is {self.state}: open it")
        if not self.ended_by and event in ("finished", "failed", "closed"):
            self.ended_by = event
        if state != self.state:
            self.state = state
            self.changed.notify()

    async def reaches(self, *states: State) -> State:
        """Its state, once that is one of ``states``."""
        while (changed := self.changed.next) and self.state not in states:
            await changed.wait()
        return self.state

    def refusal(self) -> RookeryError:
        """The error of a call after the end."""
        if self.ended_by == "closed":
            return EpisodeAway(f"episode {self.id} does not run now: its job pauses or restarts; try again later")
        return EpisodeEnded(f"episode {self.id} has ended ({self.ended_by}): its key opens nothing any more")

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """A call runs within. Raises :class:`EpisodeEnded`."""
        self.advance("called")
        self.begun = True
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1
            self.since = self.clock.monotonic()

    async def settled(self) -> bool:
        """Return when the end of the episode is durable, or will not become so in this run: false then."""
        return await self.reaches("stored", "left") == "stored"

    def end(self, result: AgentOutcome | str) -> None:
        """The agent finished, or failed with a reason. Raises :class:`EpisodeEnded` for all but the first end."""
        self.advance("failed" if isinstance(result, str) else "finished")
        self.result = result

    def store(self, failure: str) -> None:
        """Its end is durable; its job counts it as a ``failure``, unless that is empty."""
        self.failure = failure
        self.advance("stored")


class EndedKeys(NamedTuple):
    """The record of a session that ended."""

    tenant: str
    job: str
    keys: tuple[str, ...]
    """Hashes."""


class Agents:
    """The sessions of this process."""

    def __init__(
        self,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        stored: Callable[[str], Awaitable[EpisodeStanding | None]],
    ) -> None:
        """``stored(episode)`` returns what is stored of an episode."""
        self._clock = clock
        self._random = random_bytes
        self._stored = stored
        self._live: IndexedDict[str, AgentSession] = IndexedDict(job=lambda session: session.job)
        self._waiting: dict[str, dict[str, AgentSession]] = {}
        """By job and episode, in order."""
        self._asked: LRUCache[str, float] = LRUCache(ASKED_JOBS)
        """By job, when a process asked for an episode last."""
        self._asking: Counter[str] = Counter()
        self._ended: TTLCache[str, EndedKeys] = TTLCache(ENDED_SESSIONS, ENDED_SECONDS, clock.monotonic)
        """By the episode of an evaluation."""
        self._offered: dict[str, Signal] = {}
        """By job, while processes ask for its episodes: those of other jobs sleep on."""

    @property
    def count(self) -> int:
        return len(self._live)

    def waiting(self, job: str) -> int:
        """Episodes of a job that a process is to open."""
        return len(self._waiting.get(job, {}))

    @contextlib.contextmanager
    def present(self, session: AgentSession) -> Iterator[None]:
        """The session exists within."""
        self._live[session.id] = session
        if session.state == "waiting" and not session.hosted:
            self._offer(session)
        try:
            yield
        finally:
            session.advance("closed")
            self._forget_waiting(session)
            if self._live.get(session.id) is session:
                del self._live[session.id]
            if session.split == "eval":
                self._ended[session.id] = EndedKeys(session.tenant, session.job, tuple(session.keys))

    def _offer(self, session: AgentSession) -> None:
        self._waiting.setdefault(session.job, {})[session.id] = session
        if (offered := self._offered.get(session.job)) is not None:
            offered.notify()

    def _forget_waiting(self, session: AgentSession) -> None:
        waiting = self._waiting.get(session.job, {})
        waiting.pop(session.id, None)
        if not waiting:
            self._waiting.pop(session.job, None)

    async def give(self, session: AgentSession) -> str:
        """A new key of the session, which an agent is to have; durable before it is returned."""
        session.advance("opened")
        self._forget_waiting(session)
        key = KEY_PREFIX + self._random(KEY_BYTES).hex()
        first, later = session.keys[:1], [*session.keys[1:], hash_key(key)]
        session.keys = [*first, *later[1 - KEYS_KEPT :]]
        session.since = self._clock.monotonic()
        await session.save(" ".join(session.keys))
        return key

    def begin(self, tenant: str, episode: str) -> None:
        """The agent of an episode in a host of the tenant runs: its silence counts from now."""
        session = self._live.get(episode)
        if session is not None and session.tenant == tenant and session.hosted and not session.begun:
            session.begun, session.since = True, self._clock.monotonic()

    async def open(self, job: str, seconds: float) -> tuple[AgentSession, str] | None:
        """The next episode of a job that waits for an agent, with its key; None where there is none within
        ``seconds``."""
        deadline = self._clock.monotonic() + seconds
        self._asking[job] += 1
        offered = self._offered.setdefault(job, Signal())
        try:
            while True:
                changed = offered.next
                if waiting := self._waiting.get(job):
                    return await self._open(next(iter(waiting.values())))
                left = deadline - self._clock.monotonic()
                if left <= 0 or not await wait_event(changed, left):
                    return None
        finally:
            self._asking[job] -= 1
            self._asked[job] = self._clock.monotonic()
            if not self._asking[job]:
                del self._asking[job], self._offered[job]

    async def _open(self, session: AgentSession) -> tuple[AgentSession, str]:
        """The session with its key; it waits again where the process that asked for it has gone meanwhile."""
        try:
            return session, await self.give(session)
        except asyncio.CancelledError:
            if session.state == "running":
                session.keys.clear()
                session.advance("returned")
                self._offer(session)
            raise

    async def find(
        self, episode: str, key_hash: str, stored: Callable[[str], Awaitable[EpisodeStanding | None]]
    ) -> tuple[str, AgentSession | RookeryError]:
        """The tenant of the episode that a key opens, and its running session; instead of that, the error of a call,
        where the episode has ended or will run again. ``stored(episode)`` reads for a caller that is not known yet.
        Raises :class:`Unauthorized`."""
        known, ended = self._live.get(episode), self._ended.get(episode)
        if known is not None and key_hash in known.keys:
            return known.tenant, known.refusal() if known.state in OVER else known
        if ended is not None and key_hash in ended.keys:
            return ended.tenant, EpisodeEnded(f"episode {episode} has ended: its key opens nothing any more")
        found = await stored(episode)
        if found is None or key_hash not in found.agent_keys.split():
            raise Unauthorized(
                f"the key does not open the episode {episode[:80]}: an agent's key ({KEY_PREFIX}…) opens its own"
                " episode's base_url, and no other"
            )
        if found.runs_again:
            return found.tenant, self._away(episode, found)
        return found.tenant, EpisodeEnded(
            f"episode {episode} has ended ({found.state}): its key opens nothing any more"
        )

    async def session(self, tenant: str, job: str, episode: str) -> AgentSession:
        """A session of a job by the episode's id, to be ended by the process that opened it. Raises :class:`NotFound`,
        :class:`EpisodeEnded`, :class:`Unavailable`, :class:`Conflict` for one that a host runs."""
        session = self._live.get(episode)
        if session is not None and (session.tenant, session.job) == (tenant, job):
            if session.hosted:
                raise Conflict(f"episode {episode} runs in an environment host, which ends it")
            return session
        ended = self._ended.get(episode)
        if ended is not None and (ended.tenant, ended.job) == (tenant, job):
            raise EpisodeEnded(f"episode {episode} has ended: it counts no more")
        found = await self.standing(tenant, job, episode)
        if found.runs_again:
            raise self._away(episode, found)
        raise EpisodeEnded(
            f"episode {episode} has ended: it is {found.state}{f' ({found.error})' if found.error else ''}"
        )

    async def standing(self, tenant: str, job: str, episode: str) -> EpisodeStanding:
        """The stored state of an episode of a job. Raises :class:`NotFound`."""
        found = await self._stored(episode)
        if found is None or (found.tenant, found.job) != (tenant, job):
            raise NotFound(f"no episode {episode[:80]} of this job runs")
        return found

    @staticmethod
    def _away(episode: str, found: EpisodeStanding) -> EpisodeAway:
        return EpisodeAway(f"episode {episode} does not run now: its job is {found.job_state}; try again later")

    async def attend(
        self, session: AgentSession, step_timeout: float, return_timeout: float, away: Callable[[], bool]
    ) -> None:
        """Return when the agent has ended its session. Raises :class:`AgentFailed` when it makes no call for
        ``step_timeout``, unless it is ``away()``; :class:`Unavailable` when no process opens episodes of the job for
        ``return_timeout``."""
        while changed := session.changed.next:
            if session.state in OVER:
                return
            now = self._clock.monotonic()
            if session.state == "waiting":
                limit, since = return_timeout, max(session.since, self._asked.get(session.job, 0.0))
                if self._asking[session.job] or self._attended(session.job):
                    since = now
            else:
                if session.calls or away():
                    session.since = now
                elif not session.begun:  # it waits for others, which have this limit themselves
                    session.since = max(session.since, self._last_active(session.job, now))
                limit, since = step_timeout, session.since
            if now - since < limit:
                await wait_event(changed, limit - (now - since))
                continue
            if session.state == "waiting":
                raise Unavailable(
                    f"no process opens the job's episodes (POST /api/v1/jobs/{session.job}/episodes): waited"
                    f" {return_timeout:g} s for one"
                )
            if not session.begun:
                raise AgentFailed(
                    f"its agent waited {step_timeout:g} s (environment.step_timeout) for a thread of its host, while no"
                    " other agent of the job made a call; make run async, or end methods that do not return"
                )
            made = len(session.sampler.tree.turns)
            raise AgentFailed(
                f"its agent made no call for {step_timeout:g} s (environment.step_timeout), after"
                f" {count_of(made, 'reply')}"
            )

    def _last_active(self, job: str, now: float) -> float:
        """When an agent of the job called last, or began."""
        begun = [one for one in self._live.of(job=job) if one.begun and one.state == "running"]
        return max((now if one.calls else one.since for one in begun), default=0.0)

    def _attended(self, job: str) -> bool:
        """Whether an agent works at an episode of the job."""
        return any(one.state == "running" for one in self._live.of(job=job))
