"""Speculative decoding from the texts of a request's group: what is accepted, and what that gains.

On the real model, without adapters, at temperature 0.7 (untrained, it writes little JSON at 1), with the runner that
workers have here by default. *Tokens per forward*: the last of n + 1 requests of a group, after its siblings have
ended, with eight draft tokens always. *Tokens per second*: groups of eight through engines that have so many rows, with
drafts and without in turns, after a turn that does not count; the gain is that of both orders of the two, and every
pair of texts is compared, bit for bit. A second engine without drafts shows by how much equal ones differ. *Budget*:
``draft_budget`` with the times of steps measured here, and with those of a curve like a GPU's, against fixed lengths.
Pieces that are there are not measured again."""

from __future__ import annotations

import rookery.worker  # sets how torch's threads wait, before torch is there  # noqa: F401

# isort: split

import itertools
import statistics
import time
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from benchmarks.lib.bars import shown
from benchmarks.lib.cells import Cell, Cells, table
from benchmarks.lib.harness import Result, options
from benchmarks.lib.intervals import alternated
from benchmarks.lib.model import chat_ids, ours
from benchmarks.lib.workload import lists, stories, sums

from rookery import protocol
from rookery.scheduling.speculation import DraftAccount, StepCosts, draft_budget
from rookery.settings import Settings
from rookery.tokenization.chat import Chat
from rookery.worker.engine.native.drafts import MAX_DRAFT, Speculator
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.native.runner import WeightSets, best_runner
from rookery.worker.engine.sampler import SamplingKey
from rookery.worker.engine.sequences import SequenceChunk
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager

SIBLINGS = (0, 1, 3, 7)
ROWS = (1, 2, 4, 8, 16, 64)
GAMMAS = (0, 1, 2, 4, 8)
GROUP, PROMPTS, TOKENS = 8, 6, 64
COMMAND = "python -m benchmarks.micro.speculation"
TEMPERATURE = 0.7
ACCEPTANCES = (0.2, 0.5, 0.8)
KV_BYTES = 1 << 30
GAIN, LOSS = 1.3, 0.99


TASKS = {"JSON": lists, "arithmetic": sums, "free text": stories}


class Always(StepCosts):
    """As if drafts cost nothing: all are verified."""

    def seconds(self, rows: int, drafts: int) -> np.ndarray:
        return np.ones(drafts + 1)


class AlwaysOn(DraftAccount):
    """Whatever drafts cost."""

    def allows(self, rows: int) -> bool:
        return True


class Model:
    def __init__(self) -> None:
        folder, self.settings = ours(), Settings.load()
        self.decoder = Decoder.load(folder, pack=self.settings.engine.pack_weights)
        self.loras = LoraManager(self.decoder.config, self.decoder.dtype, self.decoder.device, 64)
        self.chat = Chat.load(folder)

    def engine(self, rows: int, speculator: Speculator | None) -> NativeEngine:
        compiled = self.settings.engine.cpu_kernels
        made = best_runner(self.decoder, self.loras, KV_BYTES, compiled=compiled, cache=self.settings.cache)
        weights = WeightSets(self.decoder, self.loras, made)
        return NativeEngine(weights, self.chat.decode, max_rows=rows, speculator=speculator)

    def group(self, prompt: list[int], name: str, members: range) -> Iterator[protocol.Generate]:
        for i in members:
            seed = zlib.crc32(f"{name}-{i}".encode())
            yield protocol.Generate(
                request=f"{name}-{i}", adapter=None, prompt=prompt, shared_prefix=len(prompt), max_tokens=TOKENS,
                temperature=TEMPERATURE, seed=seed, stop_tokens=self.chat.stop_tokens, group=name,
            )  # fmt: skip


def run(engine: NativeEngine, requests: list[protocol.Generate]) -> tuple[float, dict[str, list[Any]]]:
    """Seconds, and the tokens and log-probabilities of each text."""
    texts: dict[str, list[Any]] = {request.request: [] for request in requests}
    for request in requests:
        engine.submit(request)
    began = time.perf_counter()
    while engine.step():
        for chunk in engine.drain():
            texts[chunk.request] += zip(chunk.tokens, chunk.logprobs, strict=True)
    return time.perf_counter() - began, texts


def accepted(model: Model, task: str) -> Cell:
    """Tokens per forward by siblings."""
    found = {}
    for siblings in SIBLINGS:
        engine = model.engine(GROUP, Speculator(Always, AlwaysOn))
        tokens = steps = 0.0
        for i, prompt in enumerate(chat_ids(TASKS[task](PROMPTS))):
            run(engine, list(model.group(prompt, f"{task}{i}", range(1, 1 + siblings))))
            before = dict(engine.stats), engine.generated
            run(engine, list(model.group(prompt, f"{task}{i}", range(1))))
            tokens += engine.generated - before[1] - 1  # the first needs no decode step
            steps += engine.stats["decode_steps"] - before[0].get("decode_steps", 0)
        found[str(siblings)] = tokens / steps
    return found


def speeds(model: Model, task: str, rows: int, repeats: int) -> Cell:
    """Tokens per second without drafts (twice) and with them, the share of drafts that were accepted, and tokens per
    step."""
    engines = {
        "off": model.engine(rows, None),
        "on": model.engine(rows, Speculator()),
        "again": model.engine(rows, None),
    }
    found: dict[str, list[float]] = {arm: [] for arm in engines}
    groups = max(1, min(8, rows // 2))
    for turn in range(repeats + 1):
        prompts = chat_ids(TASKS[task](groups * (repeats + 1)))[turn * groups :][:groups]
        requests = [r for i, p in enumerate(prompts) for r in model.group(p, f"{task}{turn}.{i}", range(GROUP))]
        texts = {}
        for arm in engines if turn % 2 else reversed(engines):
            seconds, texts[arm] = run(engines[arm], requests)
            if turn:
                found[arm].append(sum(map(len, texts[arm].values())) / seconds)
        assert texts["on"] == texts["off"], "drafts changed a text"
    stats = engines["on"].stats
    share = stats["accepted_tokens"] / max(1.0, stats["draft_tokens"])
    return {**found, "acceptance": share, "drafts": stats["draft_tokens"] / stats["decode_steps"]}


@torch.no_grad()
def step_times(model: Model) -> Cell:
    """Milliseconds of a step by rows and draft tokens of each, the best of five."""
    runner, found = model.engine(1, None).runner, {}
    for rows in ROWS:
        slots = [slot for _ in range(rows) if (slot := runner.store.allocate(256)) is not None]
        for gamma in GAMMAS:
            chunks = [SequenceChunk("", range(5, 6 + gamma), 100, slot) for slot in slots]
            times = []
            for _ in range(5):
                began = time.perf_counter()
                logits = model.decoder.compute_logits(runner.prefill(chunks)[0])
                runner.sample(logits, [SamplingKey(i, 0, 1.0) for i in range(rows * (1 + gamma))])
                times.append(1000 * (time.perf_counter() - began))
            found[f"{rows} {gamma}"] = min(times)
        for slot in slots:
            runner.store.free(slot)
    return found


def budgets(times: Cell) -> list[list[Any]]:
    """By way and curve: the least of its tokens per second over those of the best fixed length, over rows and
    acceptances."""
    here = {(rows, gamma): float(times[f"{rows} {gamma}"]) for rows in ROWS for gamma in GAMMAS}
    curves = [here, {(rows, gamma): 20.0 + 0.1 * max(0, rows * (1 + gamma) - 200) for rows, gamma in here}]
    least: list[list[Any]] = [[way, 9.0, 9.0] for way in ("budget", *(f"always {gamma}" for gamma in GAMMAS))]
    for (number, curve), rows, alpha in itertools.product(enumerate(curves, 1), ROWS, ACCEPTANCES):
        costs, along = StepCosts(), [alpha ** (k + 1) for k in range(MAX_DRAFT)]
        for gamma in GAMMAS:
            costs.observe(rows, rows * (1 + gamma), curve[rows, gamma])
        speeds = []
        for lengths in (draft_budget([along] * rows, costs), *([gamma] * rows for gamma in GAMMAS)):
            seconds = np.interp(sum(lengths) / rows, GAMMAS, [curve[rows, gamma] for gamma in GAMMAS])
            speeds.append((rows + sum(sum(along[:length]) for length in lengths)) / seconds)
        for line, speed in zip(least, speeds, strict=True):
            line[number] = float(min(line[number], speed / max(speeds[1:])))
    return least


def _gain(cell: Cell, arm: str = "on") -> float:
    """Of drafts, or of another engine without them."""
    return alternated([on / off for off, on in zip(cell["off"], cell[arm], strict=True)])


def figures(cells: Mapping[str, Cell]) -> Result:
    result = Result("speculation", "Speculative decoding from a group's texts, without adapters", COMMAND)
    forwards = [[task, *(cells[task][str(n)] for n in SIBLINGS)] for task in TASKS if task in cells]
    for task, *values in forwards:
        rises = values == sorted(values) if task != "free text" else None  # printed only
        told = " ".join(f"{value:.2f}" for value in values)
        result.judge(f"tokens per forward rise with siblings, {task}", told, rises)
    lines = []
    for task in ("JSON", "free text"):
        own = [(rows, cell) for rows in ROWS if (cell := cells.get(f"{task} {rows}")) is not None]
        gain_of = {rows: _gain(cell) for rows, cell in own}
        equals = {rows: _gain(cell, "again") for rows, cell in own if "again" in cell}
        for rows, cell in own:
            off, on = (statistics.median(cell[arm]) for arm in ("off", "on"))
            lines.append([task, rows, off, on, gain_of[rows], equals.get(rows), cell["acceptance"], cell["drafts"]])
        for most, target in ((4, GAIN), (max(ROWS), LOSS)):
            gains = [gain for rows, gain in gain_of.items() if rows <= most]
            equal = [gain for rows, gain in equals.items() if rows <= most]
            if gains and (task == "JSON" or target == LOSS):
                gain = min(gains)
                why = f"a second engine without drafts: {min(equal):.2f} to {max(equal):.2f} x" if equal else ""
                result.judge(f"{task}, up to {most} rows: >= {target} x", shown(gain, target), gain >= target, why)
    speed_head = ["task", "rows", "tokens/s without", "with drafts", "gain", "of an equal engine", "acceptance",
                  "drafts in a step"]  # fmt: skip
    result.data["tables"] = [
        table("Tokens per forward", ["task", *(f"{n} siblings" for n in SIBLINGS)], forwards),
        table("Tokens per second, the median of the turns", speed_head, lines),
    ]
    if (times := cells.get("steps")) is not None:
        steps, ways = [[n, *(times[f"{n} {gamma}"] for gamma in GAMMAS)] for n in ROWS], budgets(times)
        curves = ["this machine's steps", "steps like a GPU's"]
        title = "In the model: the least of a way's tokens/s over the best fixed length's (acceptances 0.2, 0.5, 0.8)"
        result.data["tables"] += [
            table("Milliseconds of a step, by rows and draft tokens of each", ["rows", *map(str, GAMMAS)], steps),
            table(title, ["way", *curves], ways),
        ]
        for name, least in zip(curves, ways[0][1:], strict=True):
            result.judge(f"budget >= 0.97 of the best fixed length, {name}", f"{least:.2f}", least >= 0.97)
    return result


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--discard", action="store_true", help="drop the pieces that are there")
    given = parser.parse_args()
    model = Model()
    plan = {"tokens": TOKENS, "repeats": given.repeats, "kernels": model.settings.engine.cpu_kernels}
    cells = Cells(figures, plan, discard=given.discard)
    work: dict[str, Any] = {"steps": lambda: step_times(model)}
    for task in ("JSON", "free text"):
        work |= {f"{task} {n}": lambda task=task, n=n: speeds(model, task, n, given.repeats) for n in ROWS}
    work |= {task: lambda task=task: accepted(model, task) for task in TASKS}
    for key, measured in work.items():
        cells.measure(key, measured)
    cells.tell()


if __name__ == "__main__":
    main()
