"""Rookery's engine as a contender: what a worker's compute thread does, without the worker."""

from __future__ import annotations

import rookery.worker  # sets how torch's threads wait, before torch is there  # noqa: F401

# isort: split

import time
from dataclasses import asdict
from typing import Any

import torch
from benchmarks.lib.child import serve
from benchmarks.lib.model import adapters, ours
from benchmarks.lib.orders import RANK, generate, linear_layers, ref

from rookery import protocol
from rookery.settings import Settings
from rookery.tokenization.chat import Chat
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.native.runner import WeightSets, best_runner
from rookery.worker.model.adapter import read_adapter
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager

NEVER = "\x00rookery\x00"
"""A stop string that no text contains: the check for it is part of every step."""
FLOOR_TIMES = 20
"""The best counts."""


class Engine:
    def __init__(self) -> None:
        folder = ours()
        self.decoder = Decoder.load(folder, pack=Settings().engine.pack_weights)
        self.loras = LoraManager(self.decoder.config, self.decoder.dtype, self.decoder.device, RANK)
        for i, path in enumerate(adapters(4)):
            self.loras.add(str(i), read_adapter(path, self.decoder.config))
        self.decode = Chat.load(folder).decode
        self._engines: dict[int, NativeEngine] = {}

    def _engine(self, rows: int, shared: bool) -> NativeEngine:
        """The engine of the runs before, with the room that it has made by then, as a worker's: but a group's prompt
        shall be computed, not be found in the cache of the run before."""
        if shared or rows not in self._engines:
            runner = best_runner(self.decoder, self.loras, 4 << 30)
            self._engines[rows] = NativeEngine(WeightSets(self.decoder, self.loras, runner), self.decode, max_rows=rows)
        return self._engines[rows]

    def run(
        self,
        prompts: list[list[int]],
        adapters: int,
        tokens: int,
        given: int = 0,
        rows: int | None = None,
        shared: bool = False,
    ) -> dict[str, Any]:
        """``given``: so many tokens of each text are there already, as from another worker. ``rows``: so many texts at
        a time, else all. ``shared``: equal prompts are computed once, as those of a group."""
        most = rows or len(prompts)
        engine = self._engine(most, shared)
        requests = [
            protocol.Generate(
                request=str(i), adapter=ref(i % adapters) if adapters else None, prompt=text,
                shared_prefix=shared * len(text), max_tokens=tokens, temperature=1.0, seed=i, prefix_tokens=text[:1] *
                given,
                stop_tokens=[], stop=[NEVER],
            )
            for i, text in enumerate(prompts)
        ]  # fmt: skip
        return {**asdict(generate(engine, requests)), "bytes": self._cache_bytes(prompts[:most], tokens, shared)}

    def _cache_bytes(self, prompts: list[list[int]], tokens: int, shared: bool) -> int:
        """Of the attention cache with these texts at a time, each at its end; alignment not counted."""
        config = self.decoder.config
        each = 2 * config.layers * config.kv_heads * config.head_dim * self.decoder.dtype.itemsize
        kept = {tuple(prompt) for prompt in prompts} if shared else prompts
        return each * (sum(map(len, kept)) + tokens * len(prompts))

    def floor(self, rows: int) -> dict[str, float]:
        """Seconds of one decode step's linear layers alone, the output projection not counted, the best of many: as
        ``torch.nn.functional.linear`` multiplies by them (``seconds``), and as this engine does (``ours``)."""
        sites = linear_layers(self.decoder)
        inputs = {site.weight.shape[1]: torch.randn(rows, site.weight.shape[1]) for site in sites}
        inputs = {width: x.to(self.decoder.dtype) for width, x in inputs.items()}
        best = {"seconds": float("inf"), "ours": float("inf")}
        with torch.inference_mode():
            for _ in range(FLOOR_TIMES):
                for way in best:
                    began = time.perf_counter()
                    for site in sites:
                        x = inputs[site.weight.shape[1]]
                        torch.nn.functional.linear(x, site.weight) if way == "seconds" else site(x)
                    best[way] = min(best[way], time.perf_counter() - began)
        return best


if __name__ == "__main__":
    engine = Engine()

    def run(what: str = "generate", **task: Any) -> dict[str, Any]:
        return engine.floor(**task) if what == "floor" else engine.run(**task)

    serve({"torch": torch.__version__, "threads": torch.get_num_threads()}, run)
