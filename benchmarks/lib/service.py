"""A Rookery service of its own for one measure: real processes, a folder that goes when it ends."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from benchmarks.lib.harness import MODEL
from benchmarks.lib.workload import COMPLETIONS, PROMPTS, REPLY_TOKENS, reward

import rookery
from rookery.server.launcher import EmbeddedService, ServiceRules
from rookery.settings import Settings

START_SECONDS = 120.0
"""A worker that does not serve by then never will."""
LOOK_SECONDS = 0.2
BEAT_SECONDS = 0.5
"""The heartbeat where :func:`busy` is asked: a worker tells of its busy time with its beats."""
SETTLED_BEATS = 4
"""After so many, what it told includes all that it did before."""
JOB_SECONDS = 3600.0
"""A job that has not ended by then, at whatever it waits or pauses, makes its measure fail."""


@dataclass
class Bench:
    client: rookery.Client
    url: str
    key: str
    data: Path

    def workers(self) -> list[psutil.Process]:
        """The service's worker processes."""
        return [
            process
            for process in psutil.Process().children(recursive=True)
            if any("rookery.worker.process" in part for part in process.cmdline())
        ]


@contextmanager
def service(data: Path | None = None, rules: ServiceRules | None = None, **settings: Any) -> Iterator[Bench]:
    """With one worker that serves, unless ``settings`` say otherwise. ``data`` is a folder that stays; without it, one
    that goes."""
    with ExitStack() as stack:
        folder = data or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        given: dict[str, Any] = {"port": 0, "models": MODEL, "log_level": "WARNING"} | settings
        loaded = Settings.load(data=folder, **{"tenant_jobs": 64, **given})
        embedded = stack.enter_context(EmbeddedService(loaded, rules))
        client = stack.enter_context(rookery.Client(embedded.url, embedded.key))
        if given.get("workers", 1):
            until_served(client)
            client.sample(MODEL, "Hello", max_tokens=1)
        yield Bench(client, embedded.url, embedded.key, folder)


def until_served(client: rookery.Client, count: int = 1) -> None:
    """Waits for so many workers. Raises ``TimeoutError``."""
    deadline = time.monotonic() + START_SECONDS
    while sum(worker.state == "serving" for worker in client.workers()) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {count} workers served within {START_SECONDS:g} s: {client.workers()}")
        time.sleep(LOOK_SECONDS)


def busy(bench: Bench) -> tuple[float, float]:
    """Seconds in which the workers have decoded and trained so far, together."""
    time.sleep(SETTLED_BEATS * BEAT_SECONDS)
    beats = [worker.beat for worker in bench.client.workers() if worker.state == "serving"]
    return sum(beat.decode_seconds for beat in beats), sum(beat.train_seconds for beat in beats)


def beside_seconds(bench: Bench) -> float:
    """Seconds in which the workers have trained beside decoding so far, together."""
    beats = [worker.beat for worker in bench.client.workers() if worker.state == "serving"]
    return sum(beat.gauges.get("lanes_beside_seconds") or 0.0 for beat in beats)


def completed(job: rookery.Job) -> Any:
    """The job when it has ended. Raises ``RuntimeError`` where it did not complete, ``WaitedTooLong``."""
    ended = job.wait(JOB_SECONDS)
    if ended.state != "completed":
        raise RuntimeError(f"{ended.name} of {ended.tenant} {ended.state}: {ended.reason}")
    return ended


class Liked(rookery.Environment):
    """The questions and the reward that every contender gets; each verdict takes the world some ``seconds``."""

    def __init__(self, questions: list[str], seconds: float = 0.0) -> None:
        self.questions = questions
        self.seconds = seconds

    def prompts(self, split: str) -> list[dict[str, str]]:
        return [{"question": text} for text in self.questions]

    def reset(self, prompt: dict[str, str], seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": prompt["question"]}]

    async def step(self, reply: Any) -> rookery.Step:
        await asyncio.sleep(self.seconds)
        return rookery.Step(reward=reward(reply.tokens), done=True)


def job(name: str, steps: int, *, staleness: int = 0, seed: int = 0, **algorithm: Any) -> dict[str, Any]:
    """All but the environment of the step that TRL takes too."""
    return {
        "name": name,
        "base_model": MODEL,
        "policies": {"main": {"rank": 16, "optimizer": {"lr": 1e-4}}},
        "algorithm": {
            "group_size": COMPLETIONS,
            "groups_per_step": PROMPTS,
            "max_staleness": staleness,
            **algorithm,
        },
        "sampling": {"temperature": 1.0, "max_tokens": REPLY_TOKENS},
        "stop": {"steps": steps},
        "seed": seed,
    }
