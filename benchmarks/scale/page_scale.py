"""The page over a large database: 1,000 runs, of which one has 100,000 episodes, written straight into the database.

For each view, the time of its request over a kept connection, the service's and the loopback's; the growth of the
service's memory over all of them; and the first paint of the runs in Chromium, where that is installed."""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
from benchmarks.lib.harness import MODEL, Result, command, repeats
from sqlalchemy import insert

from rookery.controller.jobs.trajectory import EpisodeResult, ReplySpan, Trajectory, TurnRecord
from rookery.protocol import ChatMessage
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings
from rookery.spec.job import JobSpec
from rookery.storage.db import Database
from rookery.storage.models import EpisodeRow, GroupRow, JobRow, PolicyRow, StepRow, TenantRow

RUNS, EPISODES, GROUP, STEPS = 1000, 100_000, 8, 100
GROUPS_PER_STEP = EPISODES // GROUP // STEPS
BATCH = 2000
REQUESTS = 40
"""Of each view and repeat."""
CHROMIUM = Path("/usr/bin/chromium")
SPEC = JobSpec.model_validate({
    "name": "run", "base_model": MODEL, "environment": {"id": "calculator"},
    "algorithm": {"group_size": GROUP, "groups_per_step": GROUPS_PER_STEP}, "stop": {"steps": STEPS},
}).model_dump(mode="json")  # fmt: skip


def episode_text(number: int) -> bytes:
    """A stored episode of one turn with forty tokens."""
    tokens = [number % 30_000 + index for index in range(40)]
    trajectory = Trajectory(
        tokens, [-0.5] * 40, [1] * 40, prompt=list(range(60)), mask=[True] * 40, replies=[ReplySpan(0, 40, "main")]
    )
    turns = [
        ChatMessage(role="user", content=f"What is {number} + 1?"),
        ChatMessage(role="assistant", content=f"{number + 1}"),
    ]
    step = TurnRecord(1.0, {"right": 1.0}, "stop", 40, 0.1, 1.2, 0.01, [(0, "worker-1")], "main")
    result = EpisodeResult(
        [trajectory], turns, [f"{number + 1}"], 1.0, {"right": 1.0}, "done", {}, [step], speakers=["main"]
    )
    return msgspec.msgpack.encode(result)


def fill(database: Database, tenant: str) -> None:
    """Write the runs, and the episodes of ``job-0``."""
    source, start = random.Random(0), time.time() - 1e6
    jobs, policies, steps = [], [], []
    for number in range(RUNS):
        job, created = f"job-{number}", start + 600 * number
        jobs.append({"id": job, "tenant": tenant, "name": f"run-{number}", "spec": SPEC, "state": "completed",
                     "reason": f"{STEPS} steps", "created": created, "started": created, "finished": created + 500,
                     "step": STEPS, "rng": {}, "counters": {"episodes": 0 if number else EPISODES}})  # fmt: skip
        policies.append({"id": f"{job}.main", "tenant": tenant, "job": job, "name": "main", "rank": 16, "alpha": 32.0,
                         "targets": ["q"], "head_version": None})  # fmt: skip
        for step in range(1, STEPS + 1):
            reward = source.random()
            row = {"step": step, "version": step, "time": created + 5 * step, "reward": reward, "reward_std": 0.3,
                   "episodes": 8.0, "groups": 1.0, "zero_variance_share": 0.2, "length_mean": 40.0, "length_max": 60.0,
                   "turns_mean": 1.0, "staleness_mean": 0.5, "staleness_max": 1.0, "versions_mean": 1.0,
                   "tokens": 320.0, "tokens_sampled": 320 * step, "lr": 1e-4, "seconds/queue": 0.1,
                   "seconds/generation": 1.2, "seconds/environment": 0.1, "seconds/waiting": 1.0,
                   "seconds/train": 0.8}  # fmt: skip
            steps.append(
                {"job": job, "tenant": tenant, "step": step, "version": step, "reward": reward, "metrics": row}
            )
    groups = [
        {"id": f"job-0-g{number}", "tenant": tenant, "job": "job-0", "ordinal": number,
         "prompt": json.dumps(f"What is {number} + 1?").encode(), "seed": number, "state": "consumed",
         "consumed_by": number // GROUPS_PER_STEP + 1, "min_version": 0, "created": start + number,
         "finished": start + number + 1, "uses": {}}
        for number in range(EPISODES // GROUP)
    ]  # fmt: skip
    with database.writing() as connection:
        for table, rows in ((JobRow, jobs), (PolicyRow, policies), (StepRow, steps), (GroupRow, groups)):
            for begin in range(0, len(rows), BATCH):
                connection.execute(insert(table), rows[begin : begin + BATCH])
        for begin in range(0, EPISODES, BATCH):
            connection.execute(insert(EpisodeRow), [
                {"id": f"job-0-g{number // GROUP}-{number % GROUP}", "tenant": tenant, "job": "job-0",
                 "group_id": f"job-0-g{number // GROUP}", "member": number % GROUP, "state": "done", "version": 1,
                 "seed": number, "trajectories": episode_text(number), "reward": float(number % 3 == 0),
                 "finished": start + number, "versions": {}, "metrics": {}}
                for number in range(begin, begin + BATCH)
            ])  # fmt: skip


def views() -> dict[str, str]:
    """The requests of the page, by what they show."""
    job, group = "/api/v1/jobs/job-0", "job-0-g6000"
    return {
        "runs, newest first": "/api/v1/runs?limit=50",
        "runs by reward": "/api/v1/runs?limit=50&order=reward",
        "runs by part of a name": "/api/v1/runs?limit=50&text=run-77",
        "a run": job,
        "curves of a run": f"{job}/metrics?limit=2000",
        "health of a run": f"{job}/health",
        "groups of a step": f"{job}/groups?step=50&limit=50",
        "a group": f"{job}/groups/{group}",
        "episodes": f"{job}/episodes?limit=25",
        "episodes of a text": f"{job}/episodes?limit=25&text=77777",
        "an episode": f"{job}/episodes/{group}-0",
        "why episodes failed": f"{job}/failures",
        "events": f"{job}/events",
        "usage": "/api/v1/usage?limit=50",
        "timeline": "/api/v1/timeline",
    }


def main() -> None:
    times = repeats(__doc__)
    result = Result("page_scale", f"The page over {RUNS:,} runs and {EPISODES:,} episodes", command())
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings.load({}, data=folder, port=0, models="", workers=0, log_level="WARNING")
        with EmbeddedService(settings):
            pass  # makes the folder, its tables and the administrator's tenant
        database = Database(f"sqlite:///{Path(folder) / 'rookery.db'}")
        with database.reading() as connection:
            [tenant] = connection.execute(TenantRow.__table__.select()).mappings().all()
        began = time.perf_counter()
        fill(database, tenant["id"])
        database.close()
        result.add("writing the database", [time.perf_counter() - began], "s")
        with EmbeddedService(settings) as service:
            measure(result, service, times)
    result.save()


def measure(result: Result, service: EmbeddedService, times: int) -> None:
    found: dict[str, list[float]] = {name: [] for name in views()}
    process, headers = psutil.Process(), {"Authorization": f"Bearer {service.key}"}
    worst: dict[str, Any] = {}
    with httpx.Client(base_url=service.url, headers=headers, timeout=60) as client:
        for path in views().values():
            client.get(path).raise_for_status()
        before = process.memory_info().rss
        for _ in range(times):
            for name, path in views().items():
                seconds = []
                for _ in range(REQUESTS):
                    began = time.perf_counter()
                    client.get(path).raise_for_status()
                    seconds.append(time.perf_counter() - began)
                found[name].append(1000 * float(np.percentile(seconds, 95)))
        grown = (process.memory_info().rss - before) / 1e6
    for name, values in found.items():
        worst[name] = result.add(f"p95: {name}", values, "ms").median
    result.add("growth of the process over all requests", [grown], "MB")
    slowest = max(worst, key=lambda name: worst[name])
    result.judge("each view < 150 ms at p95", f"{worst[slowest]:.0f} ms ({slowest})", worst[slowest] < 150)
    result.judge("memory stays flat (< 50 MB)", f"{grown:.0f} MB", grown < 50)
    if CHROMIUM.exists():
        paints = [first_paint(service) for _ in range(times)]
        result.add("first paint of the runs in Chromium", paints, "ms")
        result.judge("first paint < 1 s", f"{max(paints):.0f} ms", max(paints) < 1000)


def first_paint(service: EmbeddedService) -> float:
    """Milliseconds from the navigation to the first content, signed in."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(service.url)
        page.fill("#key", service.key)
        page.click("button.main")
        page.wait_for_selector("tbody tr")
        page.reload()
        page.wait_for_selector("tbody tr")
        paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        value = float(page.evaluate(paint))
        browser.close()
    return value


if __name__ == "__main__":
    main()
