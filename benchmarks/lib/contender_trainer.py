"""Rookery's trainer as a contender: forward, backward, AdamW, as a worker's compute thread does them."""

from __future__ import annotations

import rookery.worker  # sets how torch's threads wait, before torch is there  # noqa: F401

# isort: split

import resource
import time
from typing import Any

import torch
from benchmarks.lib.child import serve
from benchmarks.lib.model import ours
from benchmarks.lib.orders import linear_layers, member, optimizer_steps, trainer_of, unit
from benchmarks.lib.workload import random_ids

from rookery import protocol
from rookery.settings import Settings
from rookery.worker.model.decoder import Decoder
from rookery.worker.trainer.loss_head import PROJECTED_ROWS
from rookery.worker.trainer.packed_trainer import PackedTrainer

FLOOR_TIMES = 2
"""The best counts."""
KIBIBYTE = 1024
"""In which Linux counts the most memory that a process ever had."""


class Training:
    def __init__(self) -> None:
        self.decoder = Decoder.load(ours(), pack=Settings().engine.pack_weights)
        self._kind: tuple[int, int] | None = None
        """Policies, and tokens of a slice."""
        self._trainer: PackedTrainer | None = None
        self._taken = 0

    def run(self, shapes: list[list[int]]) -> dict[str, Any]:
        """``shapes[i]`` are the lengths of tenant i's sequences; loss on every token but the first of each."""
        longest = max(max(lengths) for lengths in shapes)
        rows = iter(random_ids(sum(map(len, shapes)), longest, self.decoder.config.vocab))
        batches = [
            protocol.TrainingBatch(groups=[unit(next(rows)[:length]) for length in lengths]) for lengths in shapes
        ]
        seconds = self._step(batches, protocol.Loss(name="cross_entropy"), Settings.load().training.slice_tokens)
        return {"tokens": sum(map(sum, shapes)), "seconds": seconds}

    def groups(self, groups: int, prompt: int, members: int, reply: int, units: int) -> dict[str, Any]:
        """One tenant's step on so many groups of replies of one length, ``units`` of them in a pass. ``bytes``: the
        most memory that this process ever had."""
        ids = random_ids(groups * (members + 1), max(prompt, reply), self.decoder.config.vocab)
        made = [
            protocol.SharedPrefixGroup(prompt=texts[0][:prompt], members=[member(text[:reply]) for text in texts[1:]])
            for texts in (ids[start : start + members + 1] for start in range(0, len(ids), members + 1))
        ]
        tokens = prompt + members * (reply - 1)
        loss = protocol.Loss(name="aipo", params={"rho": 4.0})
        seconds = self._step([protocol.TrainingBatch(groups=made)], loss, units * tokens)
        return {"seconds": seconds, "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE}

    def _step(self, batches: list[protocol.TrainingBatch], loss: protocol.Loss, slice_tokens: int) -> float:
        """Seconds of one optimizer step for each tenant's batch, packed into passes of so many tokens. A trainer stays
        for the next step, as a worker's does."""
        kind = len(batches), slice_tokens
        if self._trainer is None or kind != self._kind:
            self._trainer = None  # before there is another: the most memory is that of one
            self._trainer, self._kind, self._taken = trainer_of(self.decoder, *kind), kind, 0
        self._taken += 1
        return optimizer_steps(self._trainer, batches, loss, self._taken - 1)

    def floor(self, tokens: int) -> float:
        """Seconds of the linear layers and the output projection, forward and input gradient, for ``tokens`` rows.
        Rows go in slices and chunks as large as the trainer's own, forward through its own layout of the weights."""
        best = float("inf")
        most = Settings.load().training.slice_tokens
        with torch.inference_mode():
            made: dict[tuple[int, int], torch.Tensor] = {}

            def rows(count: int, width: int) -> torch.Tensor:
                if (count, width) not in made:
                    made[count, width] = torch.randn(count, width).to(self.decoder.dtype)
                return made[count, width]

            for _ in range(FLOOR_TIMES):
                began = time.perf_counter()
                for start in range(0, tokens, most):
                    count = min(most, tokens - start)
                    for site in linear_layers(self.decoder):
                        weight = site.weight
                        site(rows(count, weight.shape[1]))
                        torch.mm(rows(count, weight.shape[0]), weight)
                    for first in range(0, count, PROJECTED_ROWS):
                        part = min(PROJECTED_ROWS, count - first)
                        head = self.decoder.head
                        torch.nn.functional.linear(rows(part, head.shape[1]), head)
                        torch.mm(rows(part, head.shape[0]), head)
                best = min(best, time.perf_counter() - began)
        return best


if __name__ == "__main__":
    training = Training()

    def run(what: str = "train", **task: Any) -> dict[str, Any]:
        if what == "floor":
            return {"seconds": training.floor(**task)}
        return training.groups(**task) if what == "groups" else training.run(**task)

    serve({"torch": torch.__version__, "threads": torch.get_num_threads()}, run)
