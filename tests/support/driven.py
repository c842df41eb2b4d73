"""A client that drives the controller's sessions call by call, without HTTP, on scripted workers and a manual clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.peers import MODEL, ScriptedWorker, Service

from rookery import protocol
from rookery.controller.sessions import operations
from rookery.controller.sessions.futures import QueueStatus
from rookery.controller.sessions.operations import AnyResult
from rookery.controller.targets import find_checkpoint
from rookery.storage.models import CheckpointRow, ModelRow, PolicyRow

ADAM = protocol.Adam(lr=0.1)


async def join(service: Service, name: str = "worker", running: Sequence[str] = ()) -> ScriptedWorker:
    """A worker that serves; it says that it is ``running`` these requests."""
    worker = ScriptedWorker(service.controller.serve_worker, service.controller.tickets, name)
    service.peers.append(worker)
    await worker.join(running)
    return worker


async def restart(service: Service) -> None:
    """Kill the service and start it again, with a worker."""
    await service.crash()
    await service.start()
    await join(service)


class Client:
    """One client of one tenant's, with its own session."""

    def __init__(self, service: Service, tenant: str = "alice") -> None:
        self.service = service
        self.tenant = tenant
        self.session = ""
        self.model = ""
        self._seq = 0

    @property
    def sessions(self) -> Any:
        return self.service.controller.sessions

    @property
    def store(self) -> Any:
        return self.service.controller.context.store

    async def find(self, path: str) -> tuple[CheckpointRow, ModelRow, PolicyRow]:
        """The checkpoint, its training run and policy."""
        return await find_checkpoint(self.service.controller.context, self.tenant, path)

    async def begin(self, rank: int = 4) -> Client:
        """A session and a model in it."""
        row = await self.sessions.create(self.tenant, None, sdk_version="0.38.0", name="", about={})
        self.session = row.id
        lora = {"rank": rank, "train_attn": True, "train_mlp": False}
        request = await self.sessions.create_run(
            self.tenant, row.id, 0, operations.CreateModel(seed=1), base_model=MODEL, lora=lora, about={}
        )
        made = await self.outcome(request)
        assert isinstance(made, operations.ModelCreated), made
        self.model = made.model_id
        return self

    async def outcome(self, request: str) -> AnyResult:
        while isinstance(found := await self.sessions.wait(self.tenant, request), QueueStatus):
            pass
        return found

    async def send(self, call: operations.AnyOperation) -> str:
        """The request's id of the model's next call."""
        self._seq += 1
        request: str = await self.sessions.submit(self.tenant, self.model, self._seq, call)
        return request

    async def do(self, call: operations.AnyOperation) -> AnyResult:
        return await self.outcome(await self.send(call))

    async def gradient(self, *tokens: int) -> AnyResult:
        return await self.do(forward(tokens or (5, 6, 7)))

    async def step(self) -> AnyResult:
        return await self.do(operations.OptimStepOperation(adam=ADAM))

    async def save(self, name: str, ttl: float | None = None, kind: Any = "weights") -> str:
        saved = await self.do(operations.SaveState(kind=kind, name=name, ttl=ttl))
        assert isinstance(saved, operations.StateSaved), saved
        return saved.path

    async def sampler(self, path: str | None, number: int = 0) -> str:
        """A sampler's id; without ``path`` of the base model."""
        base_model = MODEL if path is None else None
        row = await self.sessions.create_sampler(self.tenant, self.session, number, base_model=base_model, path=path)
        return str(row.id)

    async def sample(self, sampler: str, number: int, **more: Any) -> str:
        """The request's id."""
        given: dict[str, Any] = {
            "prompt": [5, 6], "count": 1, "max_tokens": 8, "temperature": 1.0, "seed": number, "stop": [],
            "stop_tokens": None, **more,
        }  # fmt: skip
        request: str = await self.sessions.sample(self.tenant, number, operations.Sample(sampler=sampler, **given))
        return request


def forward(tokens: Sequence[int], *, only: bool = False) -> operations.ForwardBackwardOperation:
    """Cross-entropy of each token from the one before it."""
    targets = list(tokens[1:])
    rows = len(targets)
    datum = protocol.Datum(
        tokens=list(tokens[:-1]), rows=list(range(rows)), targets=targets, logprobs=[0.0] * rows,
        advantages=[0.0] * rows, weights=[1.0] * rows,
    )  # fmt: skip
    batch = protocol.encode(protocol.TrainingBatch(data=[datum]))
    return operations.ForwardBackwardOperation(
        batch=batch, shapes=[[rows]], loss=protocol.Loss(name="cross_entropy"), forward_only=only
    )
