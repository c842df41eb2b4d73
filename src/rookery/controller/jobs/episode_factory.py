"""The episodes of a job: its prompts, its seeds, and an episode of it from either, to train on or to evaluate.

What is drawn depends on the job's seed and on the thing's place alone, so it is the same after any restart.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import msgspec

from rookery import protocol
from rookery.controller.context import ControllerContext
from rookery.controller.jobs.episode import Episode
from rookery.controller.jobs.progress import Progress
from rookery.controller.jobs.trajectory import AssistantTurn, decode_turns, derive
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.spec.job import InFlight, JobSpec
from rookery.storage.rows import EpisodeRow, JobRow
from rookery.tokenization.chat import Chat


class Episodes:
    """``owner`` is whose environment hosts may run them: the tenant, or the service. ``options`` are the environment's,
    datasets resolved."""

    def __init__(
        self,
        world: ControllerContext,
        row: JobRow,
        spec: JobSpec,
        policy: PolicyVersions,
        progress: Progress,
        *,
        owner: str,
        options: dict[str, Any],
        chat: Chat,
    ) -> None:
        self.world = world
        self.row = row
        self.spec = spec
        self.policy = policy
        self.progress = progress
        self._owner = owner
        self._options = options
        self._chat = chat

    def seed(self, *parts: object) -> int:
        """A seed of this job's."""
        return derive(self.spec.seed, *parts)

    async def prompts(
        self, split: Literal["train", "eval"], start: int, count: int, *, seed: int, shuffle: bool
    ) -> list[bytes]:
        """``count`` prompts, encoded, from the ``start``-th on in the order of ``seed``."""
        environment = self.spec.environment
        message = protocol.GetPrompts(
            call="",
            job=self.row.id,
            environment=environment.name,
            options=self._options,
            split=split,
            start=start,
            count=count,
            seed=seed,
            shuffle=shuffle,
        )
        answer = await self.world.hosts.prompts(
            self._owner,
            environment.name,
            message,
            timeout=environment.step_timeout,
            return_timeout=environment.return_timeout,
        )
        return answer.prompts

    def episode(
        self,
        *,
        id: str,
        ref: protocol.AdapterRef,
        prompt: bytes,
        seed: int,
        environment_seed: int,
        row: EpisodeRow | None = None,
        in_flight: InFlight = "finish",
    ) -> Episode:
        """An episode under ``ref``, which whoever runs it keeps available; or, where it does not finish on its version,
        under the newest one at any time. With ``row`` its turns are stored there and those stored before are taken
        up."""
        world, progress, policy = self.world, self.progress, self.policy

        def adapter() -> AbstractContextManager[protocol.AdapterRef]:
            if in_flight == "finish":
                return nullcontext(ref)
            assert policy.head is not None
            return policy.pinned(policy.head.version)

        async def save(said: list[AssistantTurn], instance: str) -> None:
            progress.sampled(len(said[-1].tokens))
            if row is not None:
                turns = msgspec.msgpack.encode(said)
                version = next((version for turn in said for version in turn.versions), ref.version)
                await progress.store(world.store.save_turns, id, turns, version=version, host_instance=instance)

        return Episode(
            id=id,
            tenant=self.row.tenant,
            owner=self._owner,
            job=self.row.id,
            spec=self.spec,
            options=self._options,
            model=self.spec.base_model,
            chat=self._chat,
            adapter=adapter,
            prompt=prompt,
            seed=seed,
            environment_seed=environment_seed,
            hosts=world.hosts,
            rollouts=world.rollouts,
            clock=world.clock,
            phases=progress.phases,
            save=save,
            said=decode_turns(row.turns) if row is not None else [],
            instance=row.host_instance if row is not None else "",
            in_flight=in_flight,
            resumable=row is not None,
        )
