"""The training loop of a policy that learns from rows: the loop of :mod:`rookery.controller.jobs.policy_loop`, whose
steps are batches of rows instead of groups of episodes.

The rows of a step are a function of the job's seed and the step's number, so a run that resumes from its last commit
takes the steps that the earlier one would have taken, bit for bit. While a step is computed, the next one's rows are
read and tokenized.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from rookery.aio import Signal, TaskGroup
from rookery.controller.fleet.env_hosts import EnvironmentFailed
from rookery.controller.jobs.job_context import JobContext, JobPolicy
from rookery.controller.jobs.policy_loop import PolicyLoop
from rookery.controller.jobs.rows import RowBatch, longest, row_batch, step_metrics
from rookery.controller.jobs.step import StepAccumulator
from rookery.errors import UserError, count_of
from rookery.storage.repositories.versions import add_evaluation

ROWS_AT_ONCE = 64
"""Rows that one call of the environment host returns: of the largest size that the settings allow by default, a quarter
of a frame."""

OF_SAMPLES = ("ratio:sum", "logp_diff:sum", "logp_diff:max")
"""The trainer's metrics that compare with the policy that sampled a token."""


@dataclass
class RowStep(StepAccumulator):
    """A step on a batch of rows."""

    batch: RowBatch | None = None

    @property
    def scale(self) -> float:
        return 1.0 / self.batch.weight if self.batch is not None and self.batch.weight else 1.0

    def describe(self) -> dict[str, float]:
        assert self.batch is not None
        return step_metrics(self.batch, self._sums)

    def trainer_metrics(self) -> dict[str, float]:
        """The metrics that :meth:`describe` does not have, and that a step on rows has a meaning for."""
        return {
            name: value
            for name, value in self._sums.items()
            if name not in (*OF_SAMPLES, "loss:sum", "pairs") and not name.endswith(":pairs")
        }


class RowLoop(PolicyLoop):
    """The loop of a policy whose job has the algorithm ``sft`` or ``dpo``."""

    _next: RowStep

    def __init__(self, job: JobContext, policy: JobPolicy, changed: Signal, rng: Callable[[], dict[str, Any]]) -> None:
        """As :class:`PolicyLoop`."""
        super().__init__(job, policy, changed, rng)
        self._coming: tuple[int, asyncio.Task[RowBatch]] | None = None
        """The batch of a later step, by the step's number."""
        self._warned = False
        """Whether this run has written the line about steps that teach nothing."""

    @property
    def _batch_size(self) -> int:
        size = self.spec.algorithm.batch_size
        assert size is not None  # of an algorithm on rows
        return size

    @property
    def needs_trainer(self) -> bool:
        """Also for the held-out loss of its last version."""
        return True

    def budget(self, in_flight: int) -> int:
        """Nothing is sampled."""
        return 0

    def _begin_step(self) -> RowStep:
        return RowStep(self.spec, self.step)

    async def _collect(self) -> bool:
        if self._out_of_time():
            return False
        began = self._controller.clock.monotonic()
        batch = await self._batch(self.step)
        self._next.batch = batch
        if batch.empty == batch.rows and not self._warned:
            self._warned = True
            await self._job.progress.add_event("warning", self._teaches_nothing(batch))
        self._next.waiting_seconds += self._controller.clock.monotonic() - began
        if self.spec.stop.steps is None or self.step + 1 < self.spec.stop.steps:
            self._coming = self.step + 1, asyncio.create_task(self._load(self.step + 1))
        self._next.add((await self._timed(self._forward(batch))).metrics)
        return True

    def _teaches_nothing(self, batch: RowBatch) -> str:
        line = f"step {self.step + 1}: none of its {count_of(batch.rows, 'row')} has {self._taught}"
        if not batch.cut:
            why = "the prompts before them differently"
            why = f"their replies alike, or {why}" if self.spec.algorithm.on_pairs else why
            return f"{line}, so the step teaches nothing: the chat template writes {why}"
        most = longest(self.spec, self.policy.chat)
        return (
            f"{line} among its first {count_of(most, 'token')} (algorithm.max_length, or the model's context), so the"
            " step teaches nothing; give shorter rows, or a larger max_length"
        )

    @property
    def _taught(self) -> str:
        """The part of a row without which it teaches nothing."""
        return "two replies that differ" if self.spec.algorithm.on_pairs else "a learned token"

    async def _batch(self, step: int) -> RowBatch:
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == step:
            return await coming[1]
        return await self._load(step)

    async def _load(self, step: int) -> RowBatch:
        """The batch of a step."""
        size = self._batch_size
        return await self._tokenized(await self._rows("train", step * size, size))

    async def _rows(self, split: Literal["train", "eval"], start: int, count: int) -> list[bytes]:
        """Rows of a split in the job's order; fewer where a held-out split ends."""
        hosts, job, rows = self._controller.rooms.hosts, self._job, list[bytes]()
        shuffle = self.spec.shuffle and split == "train"
        while len(rows) < count:
            more = min(ROWS_AT_ONCE, count - len(rows))
            answer = await hosts.split(
                job.environment, split, start + len(rows), more, seed=self.spec.seed, shuffle=shuffle
            )
            if answer.note and not start and not rows and not self.step:
                await job.progress.add_event("warning", answer.note)
            rows += answer.prompts
            if len(answer.prompts) < more:
                break
        return rows

    async def _tokenized(self, rows: list[bytes], *, forward_only: bool = False) -> RowBatch:
        try:
            return await self._controller.threads(
                row_batch, self.spec, self.policy.chat, rows, forward_only=forward_only
            )
        except (UserError, ValueError) as error:
            raise EnvironmentFailed(f"a row cannot be trained on: {error}") from None

    def _forward(self, batch: RowBatch) -> Awaitable[Any]:
        request = batch.request
        request = replace(request, reference=self.versions.reference)
        return self._run.forward(request)

    # --- held-out loss ------------------------------------------------------------------------------------------------

    async def _evaluate_if_due(self, tasks: TaskGroup) -> None:
        """Compute the held-out loss of the newest version if it is due; steps wait for it."""
        evaluation, head = self.spec.evaluation, self.versions.head
        if not evaluation.prompts or self._uncommitted or head is None or head.version in self._evaluated:
            return
        if head.version == 0 or (evaluation.every and head.step % evaluation.every == 0):
            await self._evaluate()

    async def _evaluate_last(self) -> None:
        assert self.versions.head is not None
        if self.spec.evaluation.prompts and self.versions.head.version not in self._evaluated:
            await self._evaluate()

    async def _evaluate(self) -> None:
        """Compute and store the loss of the newest version on the held-out rows."""
        store, progress, head = self._controller.store, self._job.progress, self.versions.head
        assert head is not None
        size, wanted = self._batch_size, self.spec.evaluation.prompts
        totals = {"loss:sum": 0.0, "accuracy:pairs": 0.0}
        weight, rows = 0.0, 0
        while rows < wanted:
            found = await self._rows("eval", rows, min(size, wanted - rows))
            if not found:
                break
            batch = await self._tokenized(found, forward_only=True)
            with progress.training():
                done = await self._forward(batch)
            for name in totals:
                totals[name] += done.metrics.get(name, 0.0)
            weight, rows = weight + batch.weight, rows + len(found)
        self._evaluated.add(head.version)
        finite = math.isfinite(totals["loss:sum"])
        if not weight or not finite:
            why = f"none of them has {self._taught}" if finite else "their loss is not finite"
            text = f"version {head.version}: no held-out loss on {count_of(rows, 'row')}: {why}"
            await progress.add_event("evaluation", text)
            return
        results: dict[str, Any] = {"split": "eval", "seed": self.spec.evaluation.seed, "held_out": []}
        results["loss"] = totals["loss:sum"] / weight
        if self.spec.algorithm.on_pairs:
            results["accuracy"] = totals["accuracy:pairs"] / weight
        # the score of a version is higher where it is better
        await store.write(
            add_evaluation,
            policy=self.versions.row.id,
            version=head.version,
            prompts=rows,
            mean=-results["loss"],
            stderr=0.0,
            results=results,
            created=self._controller.clock.time(),
        )
        self.versions.evaluated(head.version, -results["loss"])
        text = f"version {head.version}: held-out loss {results['loss']:.4f} on {count_of(rows, 'row')}"
        if "accuracy" in results:
            text += f", the chosen reply preferred in {results['accuracy']:.0%}"
        await progress.add_event("evaluation", text)

    def forget(self) -> None:
        super().forget()
        if self._coming is not None:
            self._coming[1].cancel()
            self._coming = None
