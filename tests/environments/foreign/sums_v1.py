"""A taskset of verifiers for tests: sums, and sums with a tool."""

from __future__ import annotations

import verifiers.v1 as vf


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class SumsConfig(vf.TasksetConfig):
    most: int = 5


class Sums(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> list[SumsTask]:
        return [
            SumsTask(SumsData(prompt=f"What is {n} + 1?", answer=str(n + 1)), self.config.task)
            for n in range(self.config.most)
        ]


__all__ = ["Sums"]
