"""One generation: the request, its result, and the life cycle of the request while it is in flight.

:class:`~rookery.protocol.Generate` is the request, from the episode to the engine. The scheduler adds the tenant, the
job and the base model.

The life cycle is the table :data:`TRANSITIONS`. A request is *waiting* in a queue, *assigned* to a worker, *decoding*
from its first token there on, and *returning* once the worker was asked to give it back. It is *retained* when its
caller left and its tokens are kept for another submission, and *ended* when it has a result or an error, or nobody will
come back for it. Only a request in one of the states :data:`AT_WORKER` has an :class:`Assignment`, its stay there.

An event yields the next state and the actions that it takes, in their order. The scheduler runs the actions
(:meth:`rookery.controller.rollout.scheduler.RolloutScheduler.apply`), and nothing else changes a state. An event that
the table does not have in a state raises :class:`InvalidEvent` with the request's story.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import msgspec

from rookery import protocol
from rookery.controller.fleet.worker import Worker
from rookery.errors import RookeryError, count_of
from rookery.telemetry.spans import TraceSpan

REASONS = ("lost", "rejected", "offloaded", "balanced", "divided", "merged")
"""Why a request moved: its worker was lost or drains; the worker rejected it; ``RolloutScheduler.migrate`` took it;
another worker could begin it sooner; its next chunk saves time elsewhere (:mod:`rookery.scheduling.divided_rollout`);
its worker trains, and another's batch took it."""

FAULTS = 3
"""Workers that sent absurd tokens of a request, and lost their connection for it, after which the request fails: it may
be its fault."""


class GenerationFailed(RookeryError):
    """The engine could not generate this request; another attempt would end the same."""


@dataclass(frozen=True)
class SamplingRequest:
    """A generation and the queue that it belongs to.

    ``generate.request`` is the request's id, the same after any restart. ``generate.adapter`` carries no ticket,
    and ``generate.prefix_tokens`` and ``generate.reserved`` are not set: the scheduler fills them in for the worker
    that gets the request."""

    tenant: str
    job: str
    model: str
    generate: protocol.Generate
    continues: bool = False
    """A later turn of an episode: it precedes its job's other requests, so that episodes and groups complete."""
    synchronous: bool = False
    """The job's step waits for all of its groups."""

    @property
    def id(self) -> str:
        return self.generate.request

    @property
    def adapter(self) -> protocol.AdapterRef | None:
        return self.generate.adapter

    def with_adapter(self, ref: protocol.AdapterRef | None) -> SamplingRequest:
        return replace(self, generate=msgspec.structs.replace(self.generate, adapter=ref))

    def superseded_by(self, ref: protocol.AdapterRef | None) -> bool:
        """Whether ``ref`` is a newer version that this request is to change to."""
        return ref is not None and ref.replaces(self.adapter, self.generate.in_flight)

    def continues_text_of(self, earlier: SamplingRequest) -> bool:
        """Whether the tokens sampled for ``earlier`` are the beginning of this request's result: it is the same text of
        the same model, of the same version or of any where that may change in flight. A worker that still holds the
        request also asks for a newer version (:meth:`rookery.worker.generation.HeldRequest.continues`)."""
        if self._queue != earlier._queue or not self.generate.same_text(earlier.generate):
            return False
        old, new = earlier.adapter, self.adapter
        if old is None or new is None:
            return old is new
        return old.policy == new.policy and (old.version == new.version or self.generate.in_flight != "finish")

    @property
    def _queue(self) -> tuple[str, str, str]:
        return self.tenant, self.job, self.model


class SamplingResult(protocol.TokenLog):
    """The sampled tokens, and how the text ended."""

    finish: str = ""
    queue_seconds: float = 0.0
    """Seconds for which the request waited for a worker."""
    prompt_logprobs: protocol.PromptLogprobs = msgspec.field(default_factory=protocol.PromptLogprobs)
    """The scores of the prompt's last tokens, where asked for."""
    top_logprobs: list[protocol.Likeliest] = msgspec.field(default_factory=list)
    """The likeliest tokens in the place of each token, where asked for; else empty."""
    workers: list[tuple[int, str]] = msgspec.field(default_factory=list)
    """The workers that sampled the tokens, each with the number of tokens before its first."""


# --- its life cycle ---------------------------------------------------------------------------------------------------

State = Literal["new", "waiting", "assigned", "decoding", "returning", "retained", "ended"]
Event = Literal[
    "submit",  # a caller asks for its result
    "assign",  # the queue yielded it, and a worker has room
    "claim",  # a worker holds it since an earlier connection
    "tokens",  # new tokens arrived
    "divide",  # its next chunk saves time at another worker
    "move",  # another worker takes it at once
    "withdraw",  # its worker is to generate no more
    "switch",  # a newer version of its policy was published
    "return",  # its worker gave it back
    "lost",  # its worker was lost, or drains
    "finish",  # its last token arrived
    "error",  # its engine failed, or sent wrong tokens
    "expire",  # it waited too long: for a worker, or for its worker's tokens
    "retain",  # its caller left, and may come back for its tokens
    "leave",  # its caller has the result or an error, or will not come back
]
Action = Literal[
    "enqueue",  # it waits behind its job's other requests; a later turn of an episode before them
    "requeue",  # it waits before all other requests of its job
    "dequeue",  # it waits no more
    "give",  # an assignment is made, and the worker receives the request
    "begin",  # its worker decodes it from now on
    "expect",  # its next worker keeps room for it
    "recall",  # its worker ends it, and sends the tokens that it has
    "abort",  # its worker deletes it
    "drop",  # its assignment ends
    "retarget",  # its worker continues it with the newer version
    "settle",  # its tenant is charged for the tokens that it has
    "forget",  # it leaves the indexes
]

AT_WORKER: tuple[State, ...] = ("assigned", "decoding", "returning")
"""States of a request that a worker has."""


def _at_worker(event: Event, state: State | None, *actions: Action) -> dict[tuple[State, Event], Transition]:
    """The transition of each state at a worker; None: it stays in its state."""
    return {(at, event): Transition(state or at, actions) for at in AT_WORKER}


class Transition(NamedTuple):
    """The effect of an event."""

    state: State
    actions: tuple[Action, ...] = ()


TRANSITIONS: dict[tuple[State, Event], Transition] = {
    ("new", "submit"): Transition("waiting", ("enqueue",)),
    ("waiting", "assign"): Transition("assigned", ("give",)),
    ("waiting", "claim"): Transition("assigned", ("dequeue", "give")),
    ("waiting", "switch"): Transition("waiting"),  # it begins with the newer version
    ("waiting", "expire"): Transition("ended", ("dequeue",)),
    ("waiting", "retain"): Transition("retained", ("dequeue", "settle")),
    ("waiting", "leave"): Transition("ended", ("dequeue", "settle", "forget")),
    ("assigned", "tokens"): Transition("decoding", ("begin",)),
    ("decoding", "tokens"): Transition("decoding"),
    ("returning", "tokens"): Transition("returning"),
    ("decoding", "divide"): Transition("returning", ("expect", "recall")),
    **_at_worker("switch", None, "retarget"),
    **_at_worker("move", "assigned", "abort", "drop", "give"),
    **_at_worker("withdraw", "waiting", "abort", "drop", "requeue"),
    **_at_worker("return", "waiting", "drop", "requeue"),
    **_at_worker("lost", "waiting", "drop", "requeue"),
    **_at_worker("finish", "ended", "drop"),
    **_at_worker("error", "ended", "drop"),
    **_at_worker("expire", "ended", "abort", "drop"),
    **_at_worker("retain", "retained", "abort", "drop", "settle"),
    **_at_worker("leave", "ended", "abort", "drop", "settle", "forget"),
    ("ended", "switch"): Transition("ended"),  # its caller has not taken the result yet
    ("ended", "retain"): Transition("retained", ("settle",)),  # the result came as its caller left
    ("ended", "leave"): Transition("ended", ("settle", "forget")),
    ("retained", "submit"): Transition("waiting", ("enqueue",)),
    ("retained", "switch"): Transition("retained"),  # it continues with the newer version
    ("retained", "leave"): Transition("ended", ("forget",)),  # its job ended, or its text was asked for again
}
"""The effect of each event in each state. Any other event is a mistake of the controller: :class:`InvalidEvent`."""

STORY = 20
"""Events of a request that an error shows, the last ones."""


class InvalidEvent(RuntimeError):
    """An event that a request cannot get in its state. The message ends with the request's last events."""

    def __init__(self, request: str, state: State, event: Event, story: Iterable[tuple[Event, str, State]]) -> None:
        events = "; ".join(f"{event}{worker and f' ({worker})'} -> {state}" for event, worker, state in story)
        super().__init__(f"request {request} is {state}, which has no event {event!r}; before: {events or 'nothing'}")


@dataclass(eq=False, slots=True)
class Assignment:
    """A request's stay at one connection of a worker. :meth:`rookery.controller.rollout.placement.WorkerPool.assign`
    makes it, :meth:`~rookery.controller.rollout.placement.WorkerPool.release` drops it."""

    worker: Worker
    name: str
    """The epoch of the connection and a number: never used twice. Tokens of another assignment are ignored."""
    reserved: bool
    """Whether it has one of the worker's rows that are reserved for clients."""
    order: float
    """Among the worker's waiting requests: the least is admitted first."""
    last_activity: float
    """When it was made, or the worker last sent tokens of it."""
    resumed: bool
    """Whether the worker had the request before this controller started."""
    since: float
    """When it was made."""
    queued_at: float
    """When the request was queued before it."""
    decoding_since: float | None = None
    """When its first token arrived."""
    tokens: int = 0
    """The number of tokens that it has brought."""
    chunk_end: float = math.inf
    """The length of the text from which on the request may move to another worker."""
    target: Worker | None = None
    """Where the request continues once this worker has returned it."""


@dataclass(eq=False)
class InflightRequest:
    """A request from its submission until its caller has the result, or until nobody may come back for its tokens."""

    request: SamplingRequest
    result: SamplingResult
    done: asyncio.Future[SamplingResult]
    on_tokens: Callable[[SamplingResult], None] | None = None
    state: State = "new"
    """Changed by :meth:`advance` alone."""
    _assignment: Assignment | None = field(default=None, init=False)
    story: deque[tuple[Event, str, State]] = field(default_factory=lambda: deque(maxlen=STORY))
    """Its last events: with the worker that had it, and the state that followed. Tokens after the first are no separate
    event."""
    versions: set[int] = field(default_factory=set)
    """The versions under which it was given to workers: any of them may have sampled its tokens."""
    line: str = ""
    """The part of its tenant's queue in which it waits."""
    expected: float = 0.0
    """Tokens that its result will have, as far as can be known before."""
    charged: float = 0.0
    """Tokens that its tenant was charged for it; 0 until it is assigned to a worker."""
    refused: dict[str, str] = field(default_factory=dict)
    """By worker that cannot generate it, the reason. It returns to none of them."""
    faults: int = 0
    """Times that a worker sent wrong tokens of it."""
    waiting_since: float = 0.0
    """Start of the time for which no worker serves its model."""
    queued_at: float = 0.0
    """When it was queued last."""

    @property
    def assignment(self) -> Assignment:
        """Its stay at the worker that has it."""
        assert self._assignment is not None, f"no worker has request {self.request.id}"
        return self._assignment

    @assignment.setter
    def assignment(self, made: Assignment) -> None:
        self._assignment = made

    @assignment.deleter
    def assignment(self) -> None:
        self._assignment = None

    @property
    def at_worker(self) -> bool:
        """Whether a worker has it: an event has left it in one of the states
        :data:`AT_WORKER`, and its actions are taken."""
        return self._assignment is not None

    def advance(self, event: Event) -> tuple[Action, ...]:
        """Enter the state that follows ``event``. Returns the actions to be taken, in their order. Raises
        :class:`InvalidEvent`."""
        transition = TRANSITIONS.get((self.state, event))
        if transition is None:
            raise InvalidEvent(self.request.id, self.state, event, self.story)
        state, actions = transition
        if event != "tokens" or state != self.state:
            self.story.append((event, self.assignment.worker.name if self.at_worker else "", state))
            self.state = state
        return actions

    def spans(self, time: float, now: float) -> tuple[TraceSpan, ...]:
        """Its wait and its stay at a worker until now (``time``: Unix, ``now``: monotonic seconds)."""
        if not self.at_worker:
            return (self._span("waiting", time - now + self.queued_at, time),) if self.state == "waiting" else ()
        assignment = self.assignment
        given, worker = time - now + assignment.since, assignment.worker.name
        decoding = time if assignment.decoding_since is None else time - now + assignment.decoding_since
        spans = [self._span("prefill", given, decoding, worker)]
        if assignment.decoding_since is not None:
            text = f"{self.request.id}, {count_of(assignment.tokens, 'token')}"
            spans.append(self._span("decode", decoding, time, worker, text))
        if assignment.since > assignment.queued_at:
            spans.append(self._span("waiting", time - now + assignment.queued_at, given))
        return tuple(spans)

    def _span(self, kind: str, start: float, end: float, worker: str = "", text: str = "") -> TraceSpan:
        request = self.request
        policy = request.adapter.policy if request.adapter is not None else ""
        return TraceSpan(kind, start, end, worker, request.tenant, request.job, policy, text or request.id)

    def suits(self, worker: Worker) -> bool:
        """Whether the worker accepts it now, and has not refused it."""
        return worker.name not in self.refused and worker.accepts(self.request.adapter)

    @property
    def policy_version(self) -> tuple[str, int]:
        """Policy and version that sample it; ``("", 0)`` for the base model."""
        adapter = self.request.adapter
        return (adapter.policy, adapter.version) if adapter is not None else ("", 0)

    @property
    def ttft_ms(self) -> float:
        """The objective of its first token, less the time that it has waited here; 0 is none."""
        objective = self.request.generate.ttft_ms
        return max(1.0, objective - 1000 * self.result.queue_seconds) if objective else 0.0

    def problem(self, chunk: protocol.TokenChunk) -> str:
        """Why a chunk cannot be part of its result; empty if it can."""
        matches = 0 <= chunk.offset <= len(self.result.tokens) and len(chunk.tokens) == len(chunk.logprobs)
        if not matches or (chunk.tokens and not self.accepts_version(chunk.policy, chunk.version)):
            sent = (chunk.policy, chunk.version)
            return f"the engine sent tokens of {sent} from {chunk.offset}, wanted {self.policy_version}"
        if self._is_absurd(chunk):
            sent_tokens = count_of(len(chunk.tokens), "token")
            return f"the engine sent {sent_tokens}, not all of them with an id and a log-probability"
        return ""

    def count_fault(self, chunk: protocol.TokenChunk) -> bool:
        """A chunk has a :meth:`problem`, which is counted if no engine that works sends such a chunk. Whether another
        worker is to continue the request: the problem is that worker's, unless it happened :data:`FAULTS` times."""
        absurd = self._is_absurd(chunk)
        self.faults += absurd
        return absurd and self.faults < FAULTS

    def _is_absurd(self, chunk: protocol.TokenChunk) -> bool:
        """No engine that works sends this."""
        known = all(map(math.isfinite, chunk.logprobs)) and all(0 <= token < 1 << 31 for token in chunk.tokens)
        known = known and (chunk.prompt_logprobs is None or self._wants_scores(chunk.prompt_logprobs))
        known = known and len(chunk.top_logprobs) == (len(chunk.tokens) if self._wants_likeliest else 0)
        return not known or chunk.offset + len(chunk.tokens) > self.request.generate.max_tokens

    def _wants_scores(self, scores: protocol.PromptLogprobs) -> bool:
        generate = self.request.generate
        wanted = min(generate.prompt_logprobs, len(generate.prompt) - 1)
        return scores.fits(generate.top_logprobs, len(self.result.prompt_logprobs), wanted)

    @property
    def _wants_likeliest(self) -> bool:
        logits = self.request.generate.logits
        return logits is not None and logits.top_logprobs > 0

    def accepts_version(self, policy: str, version: int) -> bool:
        """Whether this version may have sampled tokens of the request: a worker was given it for the request; or it is
        an older one that the worker had before this controller started, and the request may change its version."""
        wanted, newest = self.policy_version
        resumed = self.at_worker and self.assignment.resumed
        earlier = resumed and self.request.generate.in_flight != "finish" and version < newest
        return policy == wanted and (version in self.versions or earlier)
