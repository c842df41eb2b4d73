"""Rollouts and training on a worker that serves: interactive requests through the OpenAI API while two jobs train.

``python -m benchmarks.jobs.serving [--quick] [--load …] [--lanes] [--discard]``; resumable. Requests come in an open
loop, each at its time, also while earlier ones wait: ``serving_trace.csv``, one recorded draw of a Poisson process with
peaks of four times the mean in one second of eight, thinned to 20, 50 and 80% of the requests per second that the
service alone answers to 16 clients. Arms: the gate, no gate, serving only, rollouts only, and with ``--lanes`` the gate
where training may run beside decoding. A fixed split of rows is no setting any more: see the simulation
(``benchmarks.scale.serving_simulation``)."""

from __future__ import annotations

import argparse
import asyncio
import csv
import functools
import itertools
import json
import math
import os
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from benchmarks.lib.cells import Cell, Cells, table
from benchmarks.lib.harness import MODEL, Result
from benchmarks.lib.service import Bench, Liked, job, service
from benchmarks.lib.workload import stories

NAME = "benchmarks.jobs.serving"
QUICK = ", quick"
"""Ends the names of cells of one window."""
TRACE = Path(__file__).with_name("serving_trace.csv")
TRACE_RATE, TRACE_SECONDS = 12.0, 60.0
LOADS = (0.2, 0.5, 0.8)
QUICK_LOADS = (0.5,)
ARMS = ("gate", "no gate", "serving only")
LANES = "gate, lanes"
"""The gate in a worker with ``ROOKERY_LANES=auto``; the other arms take turns."""
CLIENTS = 16
CAPACITY_SECONDS = 10.0
WINDOW = 60.0
TTFT, TPOT = 2.0, 0.25
"""The service's objectives by default, in seconds."""
WITHIN = 0.99
"""Share of a window's requests, and of the windows."""
JOBS, STEPS = 2, 10_000
"""Two jobs that outlast the measurement."""
WARM_SECONDS = 60.0


def arrivals(rate: float, seconds: float) -> Iterator[tuple[float, int, int]]:
    """(time, prompt tokens, reply tokens): the trace, again and again, thinned to ``rate``."""
    rng = random.Random(0)
    rows = [(float(at), int(prompt), int(reply)) for at, prompt, reply in csv.reader(TRACE.open())]
    for turn in range(math.ceil(seconds / TRACE_SECONDS)):
        for at, prompt, reply in rows:
            when = turn * TRACE_SECONDS + at
            if when < seconds and rng.random() < rate / TRACE_RATE:
                yield when, prompt, reply


class Clients:
    """Interactive requests and their times."""

    def __init__(self, bench: Bench) -> None:
        self._http = httpx.AsyncClient(
            base_url=bench.url, headers={"Authorization": f"Bearer {bench.key}"}, timeout=120, limits=httpx.Limits()
        )
        self.seen: list[list[float]] = []
        """[arrival, seconds to the first token, seconds per further token, tokens]."""

    async def ask(self, at: float, prompt: int, reply: int) -> None:
        began = time.monotonic()
        first = last = 0.0
        tokens = 0
        body = {
            "model": MODEL, "messages": [{"role": "user", "content": "Tell me more. " * (prompt // 4)}],
            "max_tokens": reply, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if any(choice["delta"].get("content") for choice in chunk["choices"]):
                        last = time.monotonic()
                        first = first or last
                    tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        if first:  # a reply without text has no times
            self.seen.append([at, first - began, (last - first) / max(1, tokens - 1), tokens])

    async def open_loop(self, rate: float, seconds: float) -> None:
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for at, prompt, reply in arrivals(rate, seconds):
                await asyncio.sleep(max(0.0, began + at - time.monotonic()))
                group.create_task(self.ask(at, prompt, reply))
            await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))

    async def closed_loop(self, seconds: float) -> None:
        until = time.monotonic() + seconds

        async def one(number: int) -> None:
            rng = random.Random(number)
            rows = list(arrivals(TRACE_RATE, TRACE_SECONDS))
            while time.monotonic() < until:
                await self.ask(0.0, *rng.choice(rows)[1:])

        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(one(number))

    async def sampled(self) -> int:
        """Tokens sampled so far, those of rollouts and of clients."""
        return int((await self._http.get("/api/v1/health")).json()["totals"]["sampled_tokens"])


@contextmanager
def training(bench: Bench, on: bool) -> Iterator[None]:
    """While two jobs train, from the first optimizer step on."""
    jobs = []
    for i in range(JOBS if on else 0):
        jobs.append(bench.client.train(environment=Liked(stories(64)), **job(f"job{i}", STEPS, staleness=1, seed=i)))
    until = time.monotonic() + WARM_SECONDS
    while jobs and time.monotonic() < until and not all(list(one.metrics(follow=False)) for one in jobs):
        time.sleep(0.5)
    yield
    for one in jobs:
        one.cancel()


def measure(arm: str, rate: float, seconds: float) -> Cell:
    """A service of its own; ``arm`` ``rollouts only`` has no requests."""
    lanes = "auto" if arm == LANES else "turns"
    with service(slo_gate=arm != "no gate", lanes=lanes) as bench, training(bench, arm != "serving only"):

        async def run() -> Cell:
            clients = Clients(bench)
            before, began = await clients.sampled(), time.monotonic()
            await clients.open_loop(0.0 if arm == "rollouts only" else rate, seconds)
            took = time.monotonic() - began
            tokens = await clients.sampled() - before - sum(seen[3] for seen in clients.seen)
            return {"seen": clients.seen, "rollouts": tokens / took, "machine": os.getloadavg()[0]}

        return asyncio.run(run())


def capacity() -> Cell:
    """Requests per second that the service answers to so many clients, alone."""
    with service() as bench:

        async def run() -> Cell:
            clients, began = Clients(bench), time.monotonic()
            await clients.closed_loop(CAPACITY_SECONDS)
            return {"rate": len(clients.seen) / (time.monotonic() - began), "machine": os.getloadavg()[0]}

        return asyncio.run(run())


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else math.nan


def windows(seen: list[list[float]]) -> float:
    """Share of the one-minute windows in which enough requests kept both objectives."""
    kept: dict[int, list[bool]] = {}
    for at, ttft, tpot, _ in seen:
        kept.setdefault(int(at / WINDOW), []).append(ttft <= TTFT and tpot <= TPOT)
    return sum(sum(window) >= WITHIN * len(window) for window in kept.values()) / max(1, len(kept))


def lacks(cells: Mapping[str, Cell], load: float, shape: str) -> str:
    """The length of a cell, and the arms that were not measured with it."""
    absent = [arm for arm in ARMS[1:] if f"{load:.0%} {arm}{shape}" not in cells]
    return ("one window" if shape else "ten windows") + f", not measured: {', '.join(absent)}" * bool(absent)


def figures(cells: Mapping[str, Cell]) -> Result:
    result = Result("serving", "Two jobs train while clients chat through the OpenAI API", "python -m " + NAME)
    if "capacity" in cells:
        result.add(f"capacity, {CLIENTS} clients in a closed loop", [cells["capacity"]["rate"]], "requests/s")
    lines: list[list[Any]] = []
    for shape, load in itertools.product(("", QUICK), LOADS):
        alone, p99 = cells.get(f"rollouts only{shape}", {}).get("rollouts"), dict[str, float]()
        for arm in (*ARMS, LANES):
            if (cell := cells.get(f"{load:.0%} {arm}{shape}")) is None:
                continue
            seen = cell["seen"]
            firsts, paces = [one[1] for one in seen], [one[2] for one in seen]
            p99[arm] = quantile(firsts, 0.99)
            kept = sum(a <= TTFT and b <= TPOT for a, b in zip(firsts, paces, strict=True)) / max(1, len(seen))
            times = [1000 * p99[arm], 1000 * quantile(paces, 0.99), 1000 * quantile(firsts, 0.5)]
            share = cell["rollouts"] / alone if alone else None
            where = f"{load:.0%} {arm}{shape}"
            lines.append(
                [where, len(seen), *times, 100 * kept, 100 * windows(seen), cell["rollouts"], share, cell["machine"]]
            )
            if arm == "gate":
                share_kept, serving_only = windows(seen), cells.get(f"{load:.0%} serving only{shape}")
                why = f"serving only: {windows(serving_only['seen']):.0%}; " if serving_only else ""
                why += lacks(cells, load, shape)
                told = f"{share_kept:.0%}; {kept:.1%} of all requests"
                result.judge(f"{where}: >= {WITHIN:.0%} of one-minute windows within", told, share_kept >= WITHIN, why)
        if not shape and f"{load:.0%} gate" not in cells:
            target = f"{load:.0%} gate: >= {WITHIN:.0%} of one-minute windows within"
            result.judge(target, "-", None, f"ten minutes with {', '.join(ARMS[1:])}")
        if "gate" in p99 and LANES in p99:
            target = f"{load:.0%}{shape}: P99 time to first token with lanes, not above turns"
            share = p99[LANES] / p99["gate"]
            result.judge(target, f"{share:.2f} x", share <= 1.0)
        if "serving only" in p99:
            rises = [f"{arm} {p99[arm] / p99['serving only']:.2f} x" for arm in ARMS[:-1] if arm in p99]
            result.notes.append(f"{load:.0%}{shape}: P99 time to first token over serving only: {', '.join(rises)}.")
        if alone and load == LOADS[0]:
            result.add(f"rollouts only{shape}", [alone], "tokens/s")
    head = ["load and arm", "requests", "P99 TTFT, ms", "P99 TPOT, ms", "median TTFT, ms", "requests within, %"]
    head += ["windows within, %", "rollouts, tokens/s", "of rollouts only", "load average"]
    result.data["tables"] = [table(f"Objectives: TTFT {TTFT:g} s, TPOT {TPOT:g} s", head, lines)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="50%% load and a minute of each arm: six minutes")
    parser.add_argument("--load", nargs="*", type=float, choices=LOADS)
    parser.add_argument("--lanes", action="store_true", help="also the gate with ROOKERY_LANES=auto")
    parser.add_argument("--discard", action="store_true", help="drop the cells that are there")
    given = parser.parse_args()
    seconds, shape = (WINDOW, QUICK) if given.quick else (10 * WINDOW, "")
    cells = Cells(figures, {"model": MODEL}, discard=given.discard)
    rate = cells.measure("capacity", capacity)["rate"]
    cells.measure(f"rollouts only{shape}", lambda: measure("rollouts only", 0.0, seconds))
    for load in given.load or (QUICK_LOADS if given.quick else LOADS):
        for arm in (*ARMS, LANES) if given.lanes else ARMS:
            cells.measure(f"{load:.0%} {arm}{shape}", functools.partial(measure, arm, load * rate, seconds))
    cells.tell()


if __name__ == "__main__":
    main()
