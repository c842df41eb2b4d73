"""A GPU: is it right, and how fast? Rookery on the shapes of Qwen3 0.6B, 1.7B and 8B, against the device's roofline and
against transformers and PEFT.

First small models are checked against float32 on the CPU; a check that fails is the script's exit code 1. Then
generation (128 new tokens each for groups that share a prompt of 256, and beside transformers for prompts of their own)
and training (16 x 1,024 tokens, loss on every one, rank 16 on every linear layer), with random weights made on the
device in bfloat16. The roofline is the larger of operations over the device's peak and bytes over its bandwidth. Meant
for ten minutes on one H200: what does not fit is left out, and named; what was measured is written after every model.
Without a GPU nothing is measured and nothing is written."""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

import torch
from benchmarks.lib.harness import Result, command, versions
from benchmarks.lib.orders import RANK, generate, optimizer_steps, ref, trained_adapter, trainer_of, unit
from benchmarks.lib.workload import random_ids
from benchmarks.micro.gpu_models import SHAPES, Roof, decode_work, probe, random_weights, roof, training_work

from rookery import protocol
from rookery.worker.core import GPU_SLICE_TOKENS
from rookery.worker.device import free_bytes, fuses
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.native.runner import WeightSets, best_runner
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder, best_dtype
from rookery.worker.model.lora import LoraManager

T = TypeVar("T")

PART_NAMES = ("check", "generation", "training", "transformers", "peft")
ADAPTERS = 4
PEER_ROWS = 64
REPEATS = 3
PATIENCE_SECONDS = 20.0
"""A measurement is not repeated any more once its runs have taken this long."""


@dataclass(frozen=True)
class Load:
    """The sizes of what is generated and trained on."""

    rows: tuple[int, ...] = (8, 64, 256)
    prompts: int = 8
    prompt: int = 256
    """Tokens of a prompt."""
    new_tokens: int = 128
    sequences: int = 16
    """Sequences of a training step."""
    length: int = 1024
    """Tokens of each of them."""


FULL = Load()


class Budget:
    """The rest of the minutes of the whole run."""

    def __init__(self, result: Result, minutes: float) -> None:
        self._result = result
        self._end = time.perf_counter() + 60 * minutes

    def measure(self, what: str, make: Callable[[], Callable[[], tuple[int, float]]]) -> list[tuple[int, float]]:
        """Runs of what ``make`` makes ready, after one that warms up: tokens and seconds. Empty, with a note, where it
        does not run or there is no time left."""
        return self.attempt(what, lambda: _repeated(make())) or []

    def attempt(self, what: str, make: Callable[[], T]) -> T | None:
        """The result of ``make``. None, with a note, where that fails or there is no time left."""
        made: T | None = None
        try:
            if time.perf_counter() > self._end:
                raise TimeoutError("no time was left for it")
            made = make()
        except Exception as error:  # a peer that is missing, or whatever does not fit, must not end the rest
            said = " ".join(str(error).split())[:200]
            self._result.notes.append(f"{what} did not run: {type(error).__name__}: {said}")
            print(f"  {self._result.notes[-1]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        return made


def _repeated(run: Callable[[], tuple[int, float]]) -> list[tuple[int, float]]:
    """After one that warms up."""
    run()
    runs: list[tuple[int, float]] = []
    began = time.perf_counter()
    while not runs or (len(runs) < REPEATS and time.perf_counter() - began < PATIENCE_SECONDS):
        runs.append(run())
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(PART_NAMES), help=f"of {', '.join(PART_NAMES)} (default: all)")
    parser.add_argument("--models", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)} (default: all)")
    parser.add_argument("--minutes", type=float, default=9.5, help="what does not fit is left out (default: 9.5)")
    given = parser.parse_args()
    parts, models = given.only.split(","), given.models.split(",")
    if not (set(parts) <= set(PART_NAMES) and set(models) <= set(SHAPES)):
        parser.error("--only and --models take names from their lists")
    if not torch.cuda.is_available():
        print("GPU: not measured here, PyTorch sees no CUDA device")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    if not fuses(device, torch.bfloat16):
        print(f"GPU: not measured here, {name} has no fused attention in bfloat16")
        return 0
    result = Result("gpu", f"GPU: {name}, random weights in bf16, rank {RANK}", command())
    result.versions = {"GPU": name, "CUDA": str(torch.version.cuda), **versions("transformers", "peft")}
    budget = Budget(result, given.minutes)
    right = _check(result, device) if "check" in parts else True
    best = roof(name, lambda: probe(device))
    result.notes.append(
        f"Roofline: {best.flops / 1e12:.0f} TFLOP/s, {best.bytes / 1e9:.0f} GB/s ({best.source})."
        f" Generation: {FULL.prompts} prompts of {FULL.prompt} tokens, shared by their groups, or each text's own;"
        f" {FULL.new_tokens} new tokens."
        f" Training: {FULL.sequences} x {FULL.length} tokens, loss on every token."
    )
    for model in models:
        _ours(result, budget, best, model, parts, device)
        _peers(result, budget, best, model, parts, device)
        result.save()
    return 0 if right else 1


def _check(result: Result, device: torch.device) -> bool:
    from benchmarks.micro.gpu_check import checks

    try:
        found = checks(device, best_dtype(device))
    except Exception as error:  # what cannot even run is wrong, and the rest is measured all the same
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        result.judge("as float32 on the CPU", said, False)
        return False
    for check in found:
        held = f"{check.value:.2g}, may be {check.most:g}"
        result.judge(f"as float32 on the CPU: {check.what}", held, check.holds)
    return all(check.holds for check in found)


# --- Rookery --------------------------------------------------------------------------------------------------------


def _ours(result: Result, budget: Budget, best: Roof, model: str, parts: list[str], device: torch.device) -> None:
    if not {"generation", "training"} & set(parts):
        return
    config = DecoderConfig.from_hf(SHAPES[model])
    decoder = budget.attempt(
        f"{model}, Rookery", lambda: Decoder(config, random_weights(config, device, torch.bfloat16))
    )
    if decoder is None:
        return
    if "generation" in parts:
        generation = budget.attempt(f"{model}, generation", lambda: Generation(decoder))
        if generation is not None:
            for rows in FULL.rows:
                for adapters in (0, ADAPTERS):
                    _generation(result, budget, best, model, generation, rows, adapters)
            _generation(result, budget, best, model, generation, PEER_ROWS, 0, prompts=PEER_ROWS)
        del generation
    if "training" in parts:
        for tenants in (1, ADAPTERS):
            what = f"{model}, training, {tenants} adapters"
            _training(
                result, best, config, f"{what}, Rookery", budget.measure(what, partial(trained, decoder, tenants))
            )


def _training(result: Result, best: Roof, config: DecoderConfig, what: str, runs: list[tuple[int, float]]) -> None:
    if runs:
        flops = training_work(config, FULL.sequences * FULL.length, FULL.length, RANK)
        reached = statistics.median(flops / seconds for _, seconds in runs)
        result.add(
            what, [n / s for n, s in runs], "tokens/s",
            f"{reached / 1e12:.0f} TFLOP/s, {reached / best.flops:.0%} of the roofline",
        )  # fmt: skip


def _generation(
    result: Result,
    budget: Budget,
    best: Roof,
    model: str,
    generation: Generation,
    rows: int,
    adapters: int,
    prompts: int = FULL.prompts,
) -> None:
    what = f"{model}, generation, {rows} rows, {adapters} adapters"
    load = generation.load
    if prompts == rows != load.prompts:
        what += ", prompts of their own"
    runs = budget.measure(what, lambda: lambda: generation.run(rows, adapters, prompts))
    if not runs:
        return
    own = load.new_tokens / 2  # of a text, in the mean over its steps
    held = prompts * load.prompt + rows * own
    flops, moved = decode_work(generation.decoder.config, rows, load.prompt + own, held, RANK, adapters)
    step = generation.step_seconds
    result.add(f"{what}, Rookery", [n / s for n, s in runs], "tokens/s")
    result.add(
        f"{what}, Rookery's decode step", [1000 * step], "ms",
        f"{flops / step / 1e12:.1f} TFLOP/s, {moved / step / 1e9:.0f} GB/s,"
        f" {best.seconds(flops, moved) / step:.0%} of the roofline",
    )  # fmt: skip


class Generation:
    """An engine that is kept, as a worker's is: its decode steps are recorded once."""

    def __init__(self, decoder: Decoder, load: Load = FULL, kv_bytes: int | None = None) -> None:
        """``kv_bytes``: of the KV cache; half of the device's free memory where it is None."""
        self.decoder = decoder
        self.load = load
        self.step_seconds = 0.0
        """Of a decode step in the last run, sampling and bookkeeping included."""
        self._runs = 0
        self._loras = LoraManager(decoder.config, decoder.dtype, decoder.device, RANK)
        for seed in range(ADAPTERS):
            self._loras.add(str(seed), trained_adapter(decoder.config, seed))
        runner = best_runner(decoder, self._loras, free_bytes(decoder.device) // 2 if kv_bytes is None else kv_bytes)
        self._engine = NativeEngine(
            WeightSets(decoder, self._loras, runner), lambda tokens: "", max_rows=max(load.rows)
        )

    def run(self, rows: int, adapters: int, prompts: int = FULL.prompts) -> tuple[int, float]:
        """Tokens and seconds from the first prompt to the last token; texts share ``prompts`` prompts."""
        self._runs += 1
        given = random_ids(prompts, self.load.prompt, self.decoder.config.vocab)
        given = [[self._runs, *prompt[1:]] for prompt in given]  # another than the last run's, which is cached
        done = generate(
            self._engine,
            (
                protocol.Generate(
                    request=f"{self._runs}-{i}", adapter=ref(i % prompts % adapters) if adapters else None,
                    prompt=given[i % prompts], shared_prefix=self.load.prompt, max_tokens=self.load.new_tokens,
                    temperature=1.0, seed=i, stop_tokens=[],
                )
                for i in range(rows)
            ),
        )  # fmt: skip
        self.step_seconds = done.step_seconds
        return done.tokens, done.seconds


def trained(decoder: Decoder, tenants: int, load: Load = FULL) -> Callable[[], tuple[int, float]]:
    """A step of each of the tenants, packed, the batch shared out among them: tokens and seconds."""
    trainer = trainer_of(decoder, tenants, GPU_SLICE_TOKENS)
    units = [unit(row) for row in random_ids(load.sequences, load.length, decoder.config.vocab)]
    batches = [protocol.TrainingBatch(groups=units[i::tenants]) for i in range(tenants)]
    taken = count()

    def run() -> tuple[int, float]:
        seconds = optimizer_steps(trainer, batches, protocol.Loss(name="cross_entropy"), next(taken))
        return load.sequences * load.length, seconds

    return run


# --- peers ----------------------------------------------------------------------------------------------------------


def _peers(result: Result, budget: Budget, best: Roof, model: str, parts: list[str], device: torch.device) -> None:
    from benchmarks.micro import gpu_peers

    raw, vocabulary = SHAPES[model], SHAPES[model]["vocab_size"]
    if "transformers" in parts:
        prompts = random_ids(PEER_ROWS, FULL.prompt, vocabulary)
        for name, way in (("generate", gpu_peers.generator), ("generate_batch", gpu_peers.batcher)):
            what = f"{model}, generation, {PEER_ROWS} rows, 0 adapters, prompts of their own, transformers {name}"
            if runs := budget.measure(what, lambda way=way: way(gpu_peers.base(raw, device), prompts, FULL.new_tokens)):
                result.add(what, [n / s for n, s in runs], "tokens/s")
    if "peft" in parts:
        rows = random_ids(FULL.sequences, FULL.length, vocabulary)
        for size in gpu_peers.MICRO_BATCHES:
            what = f"{model}, training, 1 adapters, PEFT, micro-batch {size}"
            runs = budget.measure(
                what, lambda size=size: gpu_peers.tuner(gpu_peers.base(raw, device), rows, RANK, size)
            )
            _training(result, best, DecoderConfig.from_hf(raw), what, runs)


if __name__ == "__main__":
    sys.exit(main())
