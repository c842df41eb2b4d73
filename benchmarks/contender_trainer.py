"""Rookery's trainer as a contender: forward, backward, AdamW, as a worker's compute thread does them."""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from child import serve
from model import ALPHA, RANK, ours
from workload import random_ids

import rookery.worker  # sets how torch's threads wait, before torch is there  # noqa: F401
from rookery import wire
from rookery.settings import Settings
from rookery.worker.model.adapter import PARTS
from rookery.worker.model.decoder import Decoder
from rookery.worker.trainer.head import PROJECTED_ROWS
from rookery.worker.trainer.trainer import Trainer, initial

KIBIBYTE = 1024
"""In which Linux counts the most memory that a process ever had."""


class Training:
    def __init__(self) -> None:
        self.decoder = Decoder.load(ours(), pack=Settings().pack_weights)
        self._steps = 0

    def run(self, shapes: list[list[int]]) -> dict[str, Any]:
        """``shapes[i]`` are the lengths of tenant i's sequences; loss on every token but the first of each."""
        longest = max(max(lengths) for lengths in shapes)
        rows = iter(random_ids(sum(map(len, shapes)), longest, self.decoder.config.vocab))
        batches = [wire.Batch(units=[_unit(next(rows)[:length]) for length in lengths]) for lengths in shapes]
        seconds = self._step(batches, wire.Loss(name="cross_entropy"), Settings.load().slice_tokens)
        return {"tokens": sum(map(sum, shapes)), "seconds": seconds}

    def groups(self, groups: int, prompt: int, members: int, reply: int, units: int) -> dict[str, Any]:
        """One tenant's step on so many groups of replies of one length, ``units`` of them in a pass. ``bytes``: the
        most memory that this process ever had."""
        ids = random_ids(groups * (members + 1), max(prompt, reply), self.decoder.config.vocab)
        made = [
            wire.Unit(prompt=texts[0][:prompt], members=[_member(text[:reply]) for text in texts[1:]])
            for texts in (ids[start : start + members + 1] for start in range(0, len(ids), members + 1))
        ]
        tokens = prompt + members * (reply - 1)
        loss = wire.Loss(name="aipo", params={"rho": 4.0})
        seconds = self._step([wire.Batch(units=made)], loss, units * tokens)
        return {"seconds": seconds, "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE}

    def _step(self, batches: list[wire.Batch], loss: wire.Loss, slice_tokens: int) -> float:
        """Seconds of one optimizer step for each tenant's batch, packed into passes of so many tokens."""
        trainer = Trainer(self.decoder, max_rank=RANK, slice_tokens=slice_tokens)
        with tempfile.TemporaryDirectory() as folder:
            for i in range(len(batches)):
                self._load(trainer, i, Path(folder) / str(i))
        began = time.perf_counter()
        for i, batch in enumerate(batches):
            where = {"policy": str(i), "lease": 1, "parent": _ref(i), "steps": 0, "tenant": str(i)}
            forward = wire.ForwardBackward(op=f"f{i}", batch_ticket="", loss=loss, temperature=1.0, fresh=True, **where)
            trainer.forward_backward(forward, batch)
            trainer.optim_step(wire.OptimStep(op=f"o{i}", adam=wire.Adam(lr=1e-4, clip=1.0), **where))
        while trainer.step():
            pass
        seconds = time.perf_counter() - began
        problems = [finished.error for finished in trainer.drain() if finished.error]
        if problems:
            raise RuntimeError(problems[0])
        return seconds

    def floor(self, tokens: int) -> float:
        """Seconds of the linear layers and the output projection, forward and input gradient, for ``tokens`` rows: best
        of a few. Rows go in slices and chunks as large as the trainer's own."""
        best = float("inf")
        most = Settings.load().slice_tokens
        with torch.inference_mode():
            made: dict[tuple[int, int], torch.Tensor] = {}

            def rows(count: int, width: int) -> torch.Tensor:
                if (count, width) not in made:
                    made[count, width] = torch.randn(count, width).to(self.decoder.dtype)
                return made[count, width]

            for _ in range(4):
                began = time.perf_counter()
                for start in range(0, tokens, most):
                    count = min(most, tokens - start)
                    for layer in self.decoder.layers:
                        for site in (layer.qkv, layer.o, layer.gate_up, layer.down):
                            weight = site.weight
                            torch.nn.functional.linear(rows(count, weight.shape[1]), weight)
                            torch.mm(rows(count, weight.shape[0]), weight)
                    for first in range(0, count, PROJECTED_ROWS):
                        part = min(PROJECTED_ROWS, count - first)
                        head = self.decoder.head
                        torch.nn.functional.linear(rows(part, head.shape[1]), head)
                        torch.mm(rows(part, head.shape[0]), head)
                best = min(best, time.perf_counter() - began)
        return best

    def _load(self, trainer: Trainer, i: int, folder: Path) -> None:
        folder.mkdir()
        op = wire.InitAdapter(op="", policy=str(i), rank=RANK, alpha=ALPHA, targets=list(PARTS), seed=i, commit="")
        initial(self.decoder.config, op, None).write(folder)
        trainer.load(str(i), 1, _ref(i), folder)


def _ref(i: int) -> wire.AdapterRef:
    return wire.AdapterRef(policy=str(i), version=0, hash=str(i), rank=RANK, alpha=ALPHA)


def _unit(tokens: list[int]) -> wire.Unit:
    return wire.Unit(prompt=tokens[:1], members=[_member(tokens[1:])])


def _member(tokens: list[int]) -> wire.Member:
    own = len(tokens)
    return wire.Member(tokens=tokens, logprobs=[0.0] * own, advantages=[1.0] * own, weights=[1.0 / own] * own)


if __name__ == "__main__":
    training = Training()

    def run(what: str = "train", **task: Any) -> dict[str, Any]:
        if what == "floor":
            return {"seconds": training.floor(**task)}
        return {"train": training.run, "groups": training.groups}[what](**task)

    serve({"torch": torch.__version__, "threads": torch.get_num_threads()}, run)
