"""A request's stay at a worker, and the life cycle of a request.

The life cycle is the table :data:`TRANSITIONS`. A request is *waiting* in a queue, *assigned* to a worker, *decoding*
from its first token there on, and *returning* once the worker was asked to give it back. It is *retained* when its
caller left and its tokens are kept for another submission, and *ended* when it has a result or an error, or nobody will
come back for it. Only a request in one of the states :data:`AT_WORKER` has an :class:`Assignment`.

An event yields the next state and the actions that it takes, in their order. The scheduler runs the actions
(:meth:`rookery.controller.rollout.scheduler.RolloutScheduler.apply`), and nothing else changes a state. An event that
the table does not have in a state raises :class:`InvalidEvent` with the request's story.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rookery.controller.fleet.worker import Worker

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
