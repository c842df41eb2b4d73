"""Samplers of clients: fixed weights, or the newest that a model published, on the shared rollouts.

* A sample that was acknowledged is answered, also by a later process: its requests keep their names, so what a worker
  has sampled of them meanwhile is taken up.
* A sampler's weights stay while it is used; idle ones without a name are let go.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from math import nan
from typing import Literal

import msgspec

from rookery import protocol
from rookery.aio import TaskGroup
from rookery.controller.context import ControllerContext
from rookery.controller.rollout.scheduler import SamplingRequest
from rookery.controller.sessions import operations
from rookery.controller.sessions.checkpoints import checkpoint
from rookery.controller.sessions.futures import Future, FutureExpired, Futures, PendingOperations
from rookery.errors import RookeryError, UserError
from rookery.storage.rows import SamplerRow

log = logging.getLogger("rookery.controller.sessions.samplers")

USED_SECONDS = 60.0
"""A sampler's use is stored this often: far below the time after which idle ones are let go."""


class Samplers:
    def __init__(self, world: ControllerContext, futures: Futures) -> None:
        self._world = world
        self._futures = futures
        self._used: dict[str, float] = {}
        self._running: dict[str, tuple[SamplerRow, asyncio.Task[None]]] = {}

    async def stop(self) -> None:
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(
        self, tenant: str, session: str, id: str, *, base_model: str | None, asked_model: str | None, path: str | None
    ) -> SamplerRow:
        """A sampler of a base model, or of a checkpoint's weights."""
        world = self._world
        now = world.clock.time()
        row = SamplerRow(
            id=id, tenant=tenant, session=session, base_model=base_model or "", asked_model=asked_model or "", path="",
            model=None, inflight=False, policy="", version=0, hash="", rank=0, alpha=0.0, created=now, used=now,
            kept=True, clones=0,
        )  # fmt: skip
        if path is not None:
            found = await checkpoint(world, tenant, path)
            model, policy = await world.store.get_model(tenant, found.model)
            if base_model is not None and base_model != model.base_model:
                raise UserError(f"{path} is of {model.asked_model}, not of {asked_model}")
            row = msgspec.structs.replace(
                row, base_model=model.base_model, asked_model=model.asked_model, path=path, model=model.id,
                policy=found.policy, version=found.version, hash=found.hash, rank=policy.rank, alpha=policy.alpha,
            )  # fmt: skip
        return await world.store.add_sampler(row)

    def begin(self, future: Future, call: operations.Sample, row: SamplerRow) -> None:
        """Sample; the outcome goes to ``future``."""
        future.why = lambda: self._why(row)
        task = asyncio.create_task(self._carry_out(future, call, row), name=f"sample {future.id}")
        self._running[future.id] = (row, task)
        task.add_done_callback(lambda done: self._running.pop(future.id, None))

    async def cancel(self, future: Future) -> None:
        """Nobody wants it any more."""
        running = self._running.get(future.id)
        if running is not None:
            running[1].cancel()
            await asyncio.gather(running[1], return_exceptions=True)
            await self._futures.settle(
                future, operations.OperationFailed(error="cancelled by its client", category="user")
            )

    async def end(self, session: str) -> None:
        """The session is over: its samples end, its samplers' weights may go."""
        for id, (row, _) in list(self._running.items()):
            if row.session == session and (future := await self._futures.find(row.tenant, id)) is not None:
                await self.cancel(future)

    def _why(self, row: SamplerRow) -> PendingOperations:
        fleet = self._world.fleet
        if not fleet.serving("rollout", row.base_model):
            return PendingOperations(paused=True, reason=fleet.missing("rollout", row.base_model))
        before = self._world.rollouts.position(row.tenant, row.session)
        return (
            PendingOperations()
            if before is None
            else PendingOperations(reason=f"{before} requests wait for a worker before this one")
        )

    async def _carry_out(self, future: Future, call: operations.Sample, row: SamplerRow) -> None:
        outcome: operations.AnyOutcome
        try:
            adapter = await self._adapter(row)
            async with self._world.collector.reading(adapter):
                outcome = await self._sample(future, call, row, adapter)
        except* RookeryError as errors:
            error = _first(errors)
            outcome = operations.OperationFailed(error=str(error), category=_category(error))
        except* Exception as errors:
            error = _first(errors)
            log.exception("sample %s", future.id, extra={"tenant": row.tenant})
            outcome = operations.OperationFailed(
                error=f"internal error ({type(error).__name__}); the log has it", category="server"
            )
        await self._futures.settle(future, outcome)

    async def _sample(
        self, future: Future, call: operations.Sample, row: SamplerRow, adapter: protocol.AdapterRef | None
    ) -> operations.SampleResult:
        world = self._world
        chat = await world.chat(row.base_model)
        room = chat.context - len(call.prompt)
        if room < 1:
            raise UserError(f"the prompt has {len(call.prompt)} tokens, the model's context is {chat.context}")
        length = len(call.prompt)
        scored = 0
        if call.prompt_logprobs or call.topk:
            scored = length - 1 if call.last is None else call.last
        async with TaskGroup() as group:
            tasks = [
                group.create_task(
                    world.rollouts.sample(
                        SamplingRequest(
                            row.tenant,
                            row.session,
                            row.base_model,
                            protocol.Generate(
                                request=f"{future.id}:{number}",
                                adapter=adapter,
                                prompt=call.prompt,
                                shared_prefix=0 if scored and number == 0 else len(call.prompt),
                                max_tokens=room if call.max_tokens is None else min(call.max_tokens, room),
                                temperature=call.temperature,
                                seed=_seed(future.id if call.seed is None else str(call.seed), number),
                                stop_tokens=chat.stop_tokens if call.stop_tokens is None else call.stop_tokens,
                                stop=call.stop,
                                prompt_logprobs=scored if number == 0 else 0,
                                top_logprobs=call.topk,
                            ),
                        )
                    )
                )
                for number in range(call.count)
            ]
        replies = [task.result() for task in tasks]
        texts = [operations.SampledSequence(tokens=r.tokens, logprobs=r.logprobs, finish=r.finish) for r in replies]
        scores = replies[0].prompt_logprobs
        unscored = length - len(scores)
        return operations.SampleResult(
            texts=texts,
            prompt_logprobs=[*[nan] * unscored, *(s.logprob for s in scores)] if call.prompt_logprobs else None,
            topk=[*[[]] * unscored, *(s.top for s in scores)] if call.topk else None,
        )

    async def _adapter(self, row: SamplerRow) -> protocol.AdapterRef | None:
        """The weights to sample with now. Raises :class:`Gone` where they were let go."""
        world = self._world
        if row.inflight:
            assert row.model is not None
            model, _ = await world.store.get_model(row.tenant, row.model)
            assert model.inflight is not None
            version = await world.store.version(row.tenant, row.policy, model.inflight)
            return protocol.AdapterRef(
                policy=row.policy, version=version.version, hash=version.hash, rank=row.rank, alpha=row.alpha
            )
        if not row.hash:
            return None
        await self._touch(row)
        return protocol.AdapterRef(
            policy=row.policy, version=row.version, hash=row.hash, rank=row.rank, alpha=row.alpha
        )

    async def _touch(self, row: SamplerRow) -> None:
        """Its weights are used, and there."""
        world, now = self._world, self._world.clock.time()
        if now - self._used.get(row.id, row.used) < USED_SECONDS and row.id in self._used:
            return
        fresh = await world.store.get_sampler(row.tenant, row.id)
        if not fresh.kept:
            if not row.path or (await checkpoint(world, row.tenant, row.path)).hash != row.hash:
                raise FutureExpired(
                    f"the weights of sampler {row.id} were let go after it was idle; save them under a name"
                )
            await world.store.keep_sampler(row.id)
        self._used[row.id] = now
        await world.store.used_sampler(row.id, now)

    async def retire(self) -> None:
        """Let go of what nobody has used for long."""
        world = self._world
        before = world.clock.time() - world.settings.sessions.sampler_idle_seconds
        sampling = {row.id for row, _ in self._running.values()}
        for row in await world.store.idle_samplers(before):
            if row.id not in sampling:
                self._used.pop(row.id, None)
                await world.collector.delete_unnamed(world.store.database.let_sampler_go, row.id)


def _seed(drawn: str, number: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{drawn}:{number}".encode()).digest()[:8], "big") >> 1


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _category(error: BaseException) -> Literal["user", "server"]:
    return "user" if isinstance(error, RookeryError) and error.status < 500 else "server"
