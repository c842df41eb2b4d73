"""What modelled peers find around them: the controller of the moment, its tickets, dice, and who looks on."""

from __future__ import annotations

import asyncio
from typing import Any, Literal, Protocol

from tests.chaos.events import Events
from tests.chaos.faults import Dice, Plan
from tests.chaos.history import History
from tests.chaos.links import Peer, Wire

from rookery import protocol
from rookery.controller.controller import Controller

MODEL = "smollm2-135m-instruct"
"""The base model that everybody holds: any name of the catalogue."""
WORKER_TOKEN = "worker-token"
HOST_TOKEN = "service-key"
ENVIRONMENT = "chaos"

SLOW_SHARE = 0.1
"""Of connections and of machines: ten times as slow as the others, or worse."""


class Site(Protocol):
    plan: Plan
    dice: Dice
    events: Events
    history: History
    calm: bool
    """Faults have stopped."""

    @property
    def controller(self) -> Controller | None:
        """The one that answers now; None while it is down."""
        ...

    def dial(self, peer: Peer, kind: str) -> Wire | None:
        """A new connection, of a ``worker`` or a ``host``; None when nobody answers."""
        ...


class Timers:
    """Calls to be made later, unless their owner is gone by then."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.gone = False

    def after(self, seconds: float, call: Any, *arguments: Any) -> None:
        self._loop.call_later(seconds, self._make, call, arguments)

    def _make(self, call: Any, arguments: tuple[Any, ...]) -> None:
        if not self.gone:
            call(*arguments)

    @property
    def now(self) -> float:
        return self._loop.time()


def hello(
    name: str, instance: str, *, roles: list[Literal["rollout", "train"]], rows: int, adapters: list[str],
    running: list[str], loading: bool,
) -> protocol.Hello:  # fmt: skip
    """A worker's first frame."""
    return protocol.Hello(
        protocol=protocol.PROTOCOL, token=WORKER_TOKEN, name=name, instance=instance, model=MODEL, model_hash="model",
        roles=roles, kind="reserved" if "train" in roles else "preemptible",
        loading=loading, max_rows=rows, max_context=2048, max_rank=64, device="modelled", dtype="bfloat16",
        adapters=adapters, running=running,
    )  # fmt: skip
