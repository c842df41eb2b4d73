"""A long run of real processes with a hostile tenant: what grows, and what the other tenants notice.

``python -m benchmarks.scale.soak [--seconds N | --jobs N]``. Two tenants train small jobs one after another on a random
model of a few hundred kilobytes, chat, and drive a model through the Tinker SDK; API calls are timed in a separate
process, which waits for nothing of these. A sixth of the time they are alone; then a third tenant does all that a
caller may try, at once and without a pause, from a process of low priority, because callers are on other machines. In
the last third, worker and environment host are killed as well. Memory, descriptors, threads and the database's size are
looked at all the time; their slopes are per finished job, by least squares, after a warm-up. A run of at least ``LONG``
seconds writes ``results/soak.json``; the exit code tells whether every target that could be measured was met.

``--jobs N`` runs only N small jobs, three at a time, and judges the growth of the worker per job
(``results/soak_jobs.json``). The long run shows it and does not judge it: there jobs, chats and models of three tenants
use the worker, and touch memory that its budget counts from the start.
"""

from __future__ import annotations

import os

os.environ["TINKER_TELEMETRY"] = "0"  # before the package is there: it would look for its own service

import argparse
import json
import logging
import math
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
import tinker
from benchmarks.lib.harness import ROOT, Result, command
from benchmarks.scale.callers import ATTACKS, Attacker, insist_until_told, small_job
from tests.chaos.driver import Deployment, wait_until
from tests.support.tinkered import MODEL, RANK, datum, place_model
from websockets.sync.client import connect

import rookery
from rookery.errors import Unavailable

LONG = 1000
"""Seconds of a run whose slopes count: some hundred jobs after the warm-up."""
TENANTS, STEPS = 2, 4
LOOK_SECONDS, READ_SECONDS, KILL_SECONDS = 1.0, 0.1, 20.0
NICENESS = 19
"""Of the hostile tenant's process."""
WORKER_SLOPE = 10e3
"""Bytes that a worker may grow by a job."""
SERVICE_BYTES = 1 << 30
"""The most memory of the service during an attack."""
API_SECONDS = 0.1
"""Within which 99% of API calls are answered while it is attacked."""
END_SECONDS = 10.0
"""The time for callers to notice the end."""
ABREAST = 3
"""Jobs at a time with ``--jobs``."""
FEWEST_JOBS = 10
"""Finished jobs below which no slope is computed."""
FIGURES = (("memory", "MB", 1e-6), ("descriptors", "", 1), ("threads", "", 1))
BEYOND_SHARE = 1.15
"""A step next to a third tenant may take so many times its fair share of 3/2."""

PHASES = ("alone", "attacked", "attacked, with kills")


@dataclass
class Look:
    """One look at the processes. ``jobs``: finished so far."""

    phase: str
    jobs: int
    database: int
    seen: dict[str, tuple[int, int, int, int]]
    """(process id, resident bytes, descriptors, threads) by role."""
    parts: int
    """Bytes that the worker accounts for in its budget: states, adapters and texts that are kept until room is needed
    (128 idle states, for example, before the first is evicted)."""


@dataclass
class Soak:
    town: Deployment
    stop: threading.Event = field(default_factory=threading.Event)
    phase: str = PHASES[0]
    jobs: int = 0
    steps: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    """Seconds from one step of a job to the next, of the two tenants."""
    calls: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    """Seconds of an API call of one of them."""
    began: dict[str, float] = field(default_factory=dict)
    """When each phase began, by the machine's monotonic clock."""
    looks: list[Look] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    """The answers to the hostile tenant, by attack and status."""
    loads: list[float] = field(default_factory=list)
    """Load averages of a minute, at each look."""
    wrong: list[str] = field(default_factory=list)
    """The faults that other tenants saw."""

    def __post_init__(self) -> None:
        self.enter(PHASES[0])

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.began[phase] = time.monotonic()

    def tenant(self, name: str) -> str:
        """A key of a new tenant."""
        made = self.town.client.add_tenant(name)
        return str(self.town.client.add_key(made.id).key)

    def repeat(self, pause: float, action: Callable[..., object], *arguments: Any) -> None:
        """Repeat ``action`` until the end; its errors are those of another tenant."""
        while not self.stop.is_set():
            try:
                action(*arguments)
            except Exception as error:
                known = self.phase == PHASES[2] and isinstance(error, Unavailable)  # no worker serves just now
                if not known and not self.stop.is_set():
                    self.wrong.append(f"{self.phase}: {action.__name__}: {type(error).__name__}: {error}")
            self.stop.wait(pause)

    # --- the two tenants ----------------------------------------------------------------------------------------------

    def train(self, client: rookery.Client) -> None:
        job, last = client.submit(small_job(random.randrange(2**31), stop={"steps": STEPS})), None
        for kind, data in job.follow():
            if kind == "metrics":
                if last is not None:
                    self.steps[self.phase].append(data.time - last)
                last = data.time
            elif kind == "end" and data.state != "completed":
                raise RuntimeError(f"a job {data.state}: {data.reason}")
            if self.stop.is_set():
                return
        self.jobs += 1

    def chat(self, client: rookery.Client) -> None:
        client.sample(MODEL, "Hello", max_tokens=8)

    def take_calls(self, calls: Sequence[tuple[float, float, str]]) -> None:
        """Note the calls that :func:`read` printed."""
        for began, seconds, fault in calls:
            phase = [name for name, start in self.began.items() if start <= began][-1]
            self.calls[phase].append(seconds)
            if fault:
                self.wrong.append(f"{phase}: read: {fault}")

    def tune(self, service: tinker.ServiceClient) -> None:
        """Some steps of a new model, through the Tinker SDK."""
        model = service.create_lora_training_client(MODEL, rank=RANK).result(600)
        for _ in range(3):
            model.forward_backward([datum(range(5, 40))], "cross_entropy").result(600)
            model.optim_step(tinker.AdamParams(learning_rate=1e-3)).result(600)
        model.save_weights_for_sampler("soak", ttl_seconds=3600).result(600)

    # --- the observer -------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        parts = 0
        while not self.stop.wait(LOOK_SECONDS):
            seen = {}
            with suppress(psutil.Error, AssertionError):
                assert self.town.service is not None
                processes = {"service": psutil.Process(self.town.service.pid)}
                processes |= {kind: self.town.child(kind) for kind in ("worker", "environments")}
                for role, process in processes.items():
                    with process.oneshot():
                        threads, memory = process.num_threads(), process.memory_info().rss
                        seen[role] = (process.pid, memory, process.num_fds(), threads)
            size = (self.town.data / "rookery.db").stat().st_size
            self.loads.append(os.getloadavg()[0])
            with suppress(Unavailable):  # at the end, or next to an attack: as at the look before
                beats = [row.beat for row in self.town.client.workers() if row.state == "serving"]
                parts = sum(used for beat in beats if beat for used, _ in beat.memory_parts.values())
            self.looks.append(Look(self.phase, self.jobs, size, seen, parts))

    def kill(self) -> None:
        chance = random.Random(1)
        while not self.stop.wait(KILL_SECONDS):
            if self.phase == PHASES[2]:
                self.town.child(chance.choice(("worker", "environments"))).kill()


# --- the hostile tenant -----------------------------------------------------------------------------------------------


def attacks(hostile: Attacker) -> list[tuple[Callable[[], None], str]]:
    """All that a caller may try, each with the name for its errors: first what ``callers.py`` measures alone."""
    logging.getLogger("websockets").setLevel(logging.CRITICAL)  # it prints each connection that the service cuts
    http, answers, held = hostile.http, hostile.answers, list[socket.socket]()

    def send(what: str, path: str, content: bytes | dict[str, Any], **headers: str) -> None:
        body = json.dumps(content).encode() if isinstance(content, dict) else content
        answer = http.post(path, headers={"Content-Type": "application/json", **headers}, content=body)
        answers[f"{what}: {answer.status_code}"] += 1

    def half_requests() -> None:
        while len(held) >= 1200:
            held.pop(0).close()
        held.append(hostile.connection())
        held[-1].sendall(b"GET /healthz HTTP/1.1\r\nX-Slow: ")
        answers["half requests"] += 1
        hostile.stop.wait(0.02)

    keys = b"{" + b",".join(b'"k%d":1' % n for n in range(10**6)) + b"}"
    rows = b'{"prompt":"a","answer":""}\n' * (8 << 20 >> 5)

    def million_keys() -> None:
        send("million keys", "/api/v1/jobs/dry-run", keys)

    def huge_prompt() -> None:
        messages = [{"role": "user", "content": "word " * (14 << 20 >> 3)}]
        send("huge prompt", "/v1/chat/completions", {"model": MODEL, "messages": messages})

    def huge_jobs() -> None:
        job = small_job(1)
        job["environment"]["rows"] = [{"prompt": "x" * 1000, "answer": ""}] * 10_000
        job["algorithm"] = {"group_size": 1024, "groups_per_step": 64, "max_staleness": 8}
        send("huge job", "/api/v1/jobs", job)

    def many_jobs() -> None:
        send("one more job", "/api/v1/jobs", small_job(random.randrange(2**31), stop={"steps": 100}))

    def hub_names() -> None:
        send("hub name", "/api/v1/jobs/dry-run", small_job(1, base_model=f"someone/{secrets.token_hex(4)}"))

    def wrong_keys() -> None:
        answer = http.get("/api/v1/jobs", headers={"X-API-Key": f"tml-{secrets.token_hex(16)}"})
        answers[f"wrong key: {answer.status_code}"] += 1

    def big_frames() -> None:
        with connect(hostile.url.replace("http", "ws", 1) + "/wire/worker", open_timeout=30) as peer:
            peer.send(bytes(8 << 20))
            answers["big frame"] += 1
            peer.recv(timeout=30)

    def datasets() -> None:
        send("dataset", "/api/v1/datasets", rows, **{"Content-Type": "application/jsonl"})
        hostile.stop.wait(20)

    alone = [partial(action, hostile) for _, actions in ATTACKS.values() for action in actions]
    more = [
        half_requests, million_keys, huge_prompt, huge_jobs, many_jobs, hub_names, wrong_keys, big_frames, datasets
    ]  # fmt: skip
    return [*((action, "caller") for action in alone), *((action, action.__name__) for action in more)]


def attack(url: str, key: str) -> NoReturn:
    """The hostile tenant's process."""
    hostile = Attacker(url, key, threading.Event())
    insist_until_told(hostile, attacks(hostile), NICENESS)


def read(url: str, key: str) -> NoReturn:
    """The reading process: until the end of standard input; then it prints when each call began, its seconds, and what
    was wrong."""
    ended, calls = threading.Event(), []

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    with rookery.Client(url, key) as client:
        while not ended.wait(READ_SECONDS):
            began, fault = time.monotonic(), ""
            try:
                client.models()
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            calls.append((began, time.monotonic() - began, fault))
    print(json.dumps(calls), flush=True)
    sys.exit()


@contextmanager
def separate(option: str, url: str, key: str, take: Callable[[Any], None]) -> Iterator[None]:
    """A process of this file works within; ``take`` gets what it prints at its end."""
    command = [sys.executable, "-m", "benchmarks.scale.soak", option, url, key]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield
            printed, _ = process.communicate(timeout=END_SECONDS * 6)
            take(json.loads(printed))
        finally:
            process.kill()


# --- what came of it --------------------------------------------------------------------------------------------------


def slope(looks: Sequence[Look], figure: Callable[[Look], float]) -> float:
    """Growth per finished job after a third of the looks; NaN with too few jobs."""
    points = [(look.jobs, figure(look)) for look in looks[len(looks) // 3 :]]
    if len({jobs for jobs, _ in points}) < FEWEST_JOBS:
        return math.nan
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def longest_life(looks: Sequence[Look], role: str) -> list[Look]:
    """The looks at the process of that role that was seen most often."""
    lives = Counter(look.seen[role][0] for look in looks if role in look.seen)
    pid = lives.most_common(1)[0][0] if lives else None
    return [look for look in looks if role in look.seen and look.seen[role][0] == pid]


def add_growth(result: Result, soak: Soak) -> float:
    """The processes and the database, and how much each grows by a job. Returns the bytes by which the worker grows
    beyond the parts of its budget."""
    for role in ("worker", "service", "environments"):
        lived = longest_life(soak.looks, role)
        for number, (what, unit, scale) in enumerate(FIGURES, start=1):
            grown = slope(lived, lambda look, at=(role, number): look.seen[at[0]][at[1]])
            values = [look.seen[role][number] * scale for look in lived] or [0.0]
            result.add(f"{role}: {what}", values, unit, f"at most {max(values):.0f}; {grown:+.3g} a job")
    lived = longest_life(soak.looks, "worker")
    result.add("worker: memory in parts of its budget", [look.parts * 1e-6 for look in lived] or [0.0], "MB")
    grown = slope(lived, lambda look: look.seen["worker"][1] - look.parts)
    growth = slope(soak.looks, lambda look: look.database)
    result.add("database", [look.database / 1e6 for look in soak.looks], "MB", f"{growth / 1e3:+.1f} kB a job")
    return grown


def report(soak: Soak, seconds: float) -> Result:
    result = Result("soak", "A hostile tenant and the others, for a long time", command())

    def judge(target: str, measured: str, met: bool, why: str = "") -> None:
        """A target that only a long run can meet."""
        result.judge(target, measured, met if seconds >= LONG else None, why)

    busy = result.add("load average of the machine", soak.loads, "", f"{os.cpu_count()} cores").median
    crowded = f"load average {busy:.0f} on {os.cpu_count()} cores, the attacking program's included"
    add_growth(result, soak)
    peak = max(look.seen["service"][1] for look in soak.looks if look.seen)
    result.judge("the service stays below 1 GiB", f"{peak / 2**20:.0f} MiB", peak < SERVICE_BYTES)
    for phase in PHASES:
        result.add(f"step, {phase}", soak.steps[phase] or [0.0], "s", f"{len(soak.steps[phase])} steps")
        row = result.add(f"API call, {phase}", soak.calls[phase] or [0.0], "s", f"{len(soak.calls[phase])} calls")
        slowest = sorted(row.values)[int(0.99 * (len(row.values) - 1))]
        if phase == PHASES[1]:
            judge("99% of API calls next to it < 100 ms", f"{slowest * 1e3:.0f} ms", slowest < API_SECONDS, crowded)
    alone, crowded_step = (statistics.median(soak.steps[phase] or [math.nan]) for phase in PHASES[:2])
    share = crowded_step / alone * TENANTS / (TENANTS + 1)
    judge("a step next to it < 1.15 x its fair share", f"{share:.2f} x", share < BEYOND_SHARE, crowded)
    failed = sum(": train:" in text for text in soak.wrong)
    result.judge("no job of another tenant fails", f"{failed}, and {soak.jobs} completed", failed == 0)
    judge("no call of another tenant fails", f"{len(soak.wrong) - failed}", len(soak.wrong) == failed)
    answers = ", ".join(f"{count:,} x {what}" for what, count in sorted(soak.answers.items()))
    result.notes = [f"{soak.jobs} jobs of {STEPS} steps of the two tenants. What the hostile one got: {answers}."]
    result.notes += [f"Wrong: {text}." for text in sorted(set(soak.wrong))[:20]]
    return result


def run(seconds: float, folder: Path) -> Soak:
    place_model(folder)
    with Deployment(folder, folder / "cache", Path(MODEL), workers=1) as town, ExitStack() as stack:
        soak, threads = Soak(town), []

        def begin(work: Callable[..., object], *arguments: Any) -> None:
            threads.append(threading.Thread(target=work, args=arguments, daemon=True))
            threads[-1].start()

        wait_until(lambda: any(row.state == "serving" for row in town.client.workers()), "a worker serves")
        keys = [soak.tenant(f"tenant{number}") for number in range(TENANTS)]
        for key in keys:
            client = stack.enter_context(rookery.Client(town.url, key))
            begin(soak.repeat, 0.0, soak.train, client)
            begin(soak.repeat, 0.5, soak.chat, client)
            begin(soak.repeat, 1.0, soak.tune, tinker.ServiceClient(base_url=f"{town.url}/tinker", api_key=key))
        begin(soak.watch)
        begin(soak.kill)
        with separate("--read", town.url, keys[0], soak.take_calls):
            time.sleep(seconds / 6)
            soak.enter(PHASES[1])
            with separate("--attack", town.url, soak.tenant("hostile"), soak.answers.update):
                time.sleep(seconds / 2)
                soak.enter(PHASES[2])
                time.sleep(seconds / 3)
                soak.stop.set()
        ended = time.monotonic() + END_SECONDS
        for thread in threads:
            thread.join(max(0.0, ended - time.monotonic()))
        assert town.service is not None and town.service.poll() is None, town.log_tail("service")
        return soak


def run_jobs(count: int, folder: Path) -> Soak:
    """``count`` small jobs of one tenant, :data:`ABREAST` at a time."""
    place_model(folder)
    kept = {"tenant_adapters": str(10 * count)}
    with Deployment(folder, folder / "cache", Path(MODEL), workers=1, **kept) as town:
        soak = Soak(town)
        wait_until(lambda: any(row.state == "serving" for row in town.client.workers()), "a worker serves")
        watching = threading.Thread(target=soak.watch)
        watching.start()
        with rookery.Client(town.url, soak.tenant("tenant")) as client, ThreadPoolExecutor(ABREAST) as pool:
            for done in [pool.submit(soak.train, client) for _ in range(count)]:
                done.result()
        soak.stop.set()
        watching.join()
        return soak


def report_jobs(soak: Soak) -> Result:
    result = Result("soak_jobs", f"Growth from job to job: {soak.jobs} small ones, three at a time", command())
    grown = add_growth(result, soak)
    target = "a worker grows by < 10 kB a job beyond what its budget accounts for"
    result.judge(target, f"{grown / 1e3:+.2f} kB", grown < WORKER_SLOPE if soak.jobs >= LONG else None)
    result.notes = [f"Jobs of {STEPS} steps of 2 groups of 4 on a random model of some hundred kilobytes."]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=1200)
    parser.add_argument("--jobs", type=int, default=0, help="only so many small jobs, three at a time")
    for work in ("--attack", "--read"):
        parser.add_argument(work, nargs=2, metavar=("URL", "KEY"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        attack(*given.attack)
    if given.read:
        read(*given.read)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        if given.jobs:
            result = report_jobs(run_jobs(given.jobs, Path(folder)))
        else:
            result = report(run(given.seconds, Path(folder)), given.seconds)
    print("\n".join(result.notes))
    if max(given.jobs, given.seconds * (not given.jobs)) >= LONG:
        result.save()
    sys.exit(any(verdict.met is False for verdict in result.verdicts))


if __name__ == "__main__":
    main()
