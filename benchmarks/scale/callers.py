"""One caller against the rest: each attack alone, and what another tenant notices of it.

``python -m benchmarks.scale.callers [--seconds N] [--only C1 C9] [--save]``. Another tenant trains small jobs one after
another and sends a GET twenty times a second. For each attack its figures of ``--seconds`` before are compared with
those during the attack, so that a busy machine slows both alike. The exit code tells whether every target was met; the
absolute ones count on a quiet machine of two cores. All of them take about seven minutes.

An attack is a process of its own with the lowest priority: callers have machines of their own, so what it costs to make
an attack is not part of what the service notices of it. The other tenant's fair share of a step is computed from the
database: while the attacker has a running job, both are entitled to half of the worker.
"""

from __future__ import annotations

import os

os.environ["TINKER_TELEMETRY"] = "0"

import argparse
import io
import json
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn

import httpx
import psutil
from benchmarks.lib.harness import ROOT, Result, ResultFolders, Row, Verdict, command, commit
from tests.chaos.driver import Deployment, wait_until
from tests.support.tinkered import MODEL, RANK, place_model
from websockets.sync.client import connect

import rookery
from rookery import protocol
from rookery.children import lower_priority

GET_SECONDS, FAIR_STEP, SERVICE_BYTES = 0.05, 1.25, 300e6
"""Targets: 99% of another tenant's GETs within it, a step within so many times its fair share, the service's growth."""

TARGETS = "others' GET p99 <= 50 ms, step <= 1.25 x fair share, service <= +300 MB, worker within its budget"
FAILURES = "no call and no job of the other tenant fails"

READ_SECONDS = 0.05
"""Between two GETs of the other tenant."""

LOOK_SECONDS = 0.1
"""Between two looks at the service's memory and at the attacker's jobs."""

END_SECONDS = 30.0
"""The time for an attack's process to end."""

WARM_SECONDS = 8.0
"""Before the first measure: the first jobs load what later ones share."""

JSON = {"Content-Type": "application/json"}


def small_job(seed: int, **changes: Any) -> dict[str, Any]:
    rows = [{"prompt": f"Write of {number}.", "answer": ""} for number in range(7)]
    return {
        "name": "small",
        "base_model": MODEL,
        "environment": {"id": "jsonl", "rows": rows, "verifier": {"name": "regex", "pattern": "[a-m].*[n-z]"}},
        "policies": {"main": {"rank": RANK, "optimizer": {"lr": 0.01}}},
        "algorithm": {"group_size": 4, "groups_per_step": 2},
        "sampling": {"max_tokens": 16},
        "checkpoints": {"keep_last": 1},
        "stop": {"steps": 4},
        "seed": seed,
        **changes,
    }


class ManyNames(rookery.Environment):
    """Every episode has a hundred metrics of its own."""

    def prompts(self, split: Any) -> Any:
        return range(64)

    def reset(self, prompt: Any, seed: int) -> Any:
        return [{"role": "user", "content": f"Write of {prompt}."}]

    def step(self, reply: Any) -> Any:
        metrics = {f"{secrets.token_hex(8)}-{number}": 1.0 for number in range(100)}
        return rookery.Step(reward=random.random(), done=True, metrics=metrics)


class LongRole(ManyNames):
    """The first message has a role of seven megabytes."""

    def reset(self, prompt: Any, seed: int) -> Any:
        return [{"role": "r" * 7_000_000, "content": "x"}]


LARGE_BODIES = ("stops", "base_model", "hosted", "metadata", "brackets", "digits", "messages", "rows")


@cache
def large_body(name: str) -> bytes:
    """A body that an attack sends again and again."""
    match name:
        case "stops":
            return encoded(small_job(1, sampling={"stop": ["x" * 12_000_000]}))
        case "base_model":
            return encoded(small_job(1, base_model="x" * 15_000_000))
        case "hosted":
            return encoded(small_job(1, environment={"hosted": "x" * 12_000_000}))
        case "metadata":
            return encoded({"user_metadata": {"x": "x" * 15_000_000}})
        case "brackets":
            return b"]" * 16_000_000
        case "digits":
            return b"[" + b",".join([b"1" * 4000] * 3500) + b"]"
        case "messages":
            return b"\x1a\x00" * 7_500_000
        case "rows":
            rows = [{"prompt": "x" * 100, "answer": ""}] * 60_000
            return encoded(small_job(1, environment={"id": "jsonl", "rows": rows, "verifier": "exact"}))
    raise KeyError(name)


def encoded(body: Any) -> bytes:
    return json.dumps(body).encode()


@dataclass
class Attacker:
    """A hostile tenant. ``answers`` counts what it gets."""

    url: str
    key: str
    stop: threading.Event
    answers: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, headers={"X-API-Key": self.key}, timeout=60)
        self.held: list[socket.socket] = []

    def connection(self) -> socket.socket:
        assert self.http.base_url.port is not None
        return socket.create_connection((self.http.base_url.host, self.http.base_url.port), timeout=10)

    def post(self, path: str, content: Any, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else encoded(content)
        self.count(self.http.post(path, content=body, headers={**JSON, **(headers or {})}))

    def get(self, path: str) -> None:
        self.count(self.http.get(path))

    def count(self, answer: httpx.Response) -> None:
        self.answers[str(answer.status_code)] += 1

    # --- the attacks --------------------------------------------------------------------------------------------------

    def patterns(self) -> None:
        pattern = random.choice(["(" * 20 + "a" + "){1,9}" * 20, "a{30000000}"]) + secrets.token_hex(4)
        environment = {
            "id": "jsonl",
            "rows": [{"prompt": "?", "answer": "1"}],
            "verifier": {"name": "regex", "pattern": pattern},
        }
        self.post("/api/v1/jobs/dry-run", small_job(1, environment=environment))

    def metric_names(self) -> None:
        self._train(ManyNames())

    def long_roles(self) -> None:
        self._train(LongRole())

    def _train(self, environment: rookery.Environment) -> None:
        with rookery.Client(self.url, self.key) as client:
            job = client.train(
                base_model=MODEL, environment=environment, algorithm={"group_size": 64, "groups_per_step": 8},
                sampling={"max_tokens": 4}, policies={"main": {"rank": RANK}}, stop={"steps": 50},
            )  # fmt: skip
            self.stop.wait()
            job.cancel()
            self.answers[job.show().state] += 1

    def datasets(self) -> None:
        rows = io.BytesIO(b'{"prompt":"a","answer":"1"}\n' * 1_500_000)
        made = self.http.post("/api/v1/datasets", content=iter(lambda: rows.read(1 << 20), b""))
        self.count(made)
        if made.status_code == 201:
            verifier = {"name": "exact", "right": random.random()}
            environment = {"id": "jsonl", "dataset": made.json()["dataset"], "verifier": verifier}
            self.post("/api/v1/jobs/dry-run", small_job(1, environment=environment))

    def stops(self) -> None:
        self.post("/api/v1/jobs", large_body("stops"))

    def bodies_that_never_come(self) -> None:
        while len(self.held) >= 576:
            self.held.pop(0).close()
        self.held.append(self.connection())
        head = f"POST /api/v1/jobs HTTP/1.1\r\nHost: x\r\nX-API-Key: {self.key}\r\nContent-Length: 9\r\n\r\n"
        self.held[-1].sendall(head.encode())
        self.answers["half requests"] += 1
        self.stop.wait(0.002)

    def long_names(self) -> None:
        self.post("/api/v1/jobs/dry-run", large_body("base_model"))
        self.post("/api/v1/jobs", large_body("hosted"))
        self.post("/tinker/api/v1/create_session", large_body("metadata"))
        self.get("/tinker/api/v1/sessions")

    def costly_bytes(self) -> None:
        self.post("/api/v1/jobs/dry-run", large_body("brackets"))
        self.post("/api/v1/jobs/dry-run", large_body("digits"))
        protobuf = {"Content-Type": "application/x-protobuf"}
        self.post("/tinker/api/v1/forward_backward", large_body("messages"), protobuf)

    def many_gets(self) -> None:
        self.get(random.choice(["/api/v1/jobs", "/api/v1/models", "/tinker/api/v1/sessions", "/api/v1/uploads"]))

    def many_dry_runs(self) -> None:
        self.post("/api/v1/jobs/dry-run", small_job(random.randrange(2**31)))

    def large_json(self) -> None:
        seed = b'"seed": %d' % random.randrange(2**31)
        self.post("/api/v1/jobs/dry-run", large_body("rows").replace(b'"seed": 1', seed))

    def slow_readers(self) -> None:
        job = self.http.post("/api/v1/jobs", json=small_job(1, stop={"steps": 100})).json().get("id", "none")
        while len(self.held) < 200 and not self.stop.is_set():
            reader = self.connection()
            request = f"GET /api/v1/jobs/{job}/metrics/stream HTTP/1.1\r\nHost: x\r\nX-API-Key: {self.key}\r\n\r\n"
            reader.sendall(request.encode())
            self.held.append(reader)
        for reader in self.held:
            with suppress(OSError):
                reader.settimeout(0.001)
                reader.recv(1)
        self.answers["streams"] = len(self.held)
        self.stop.wait(1)

    def slow_uploads(self) -> None:
        def trickle() -> Iterator[bytes]:
            while not self.stop.wait(0.2):
                yield b'{"prompt":"a","answer":"1"}\n' * 10

        self.count(self.http.post("/api/v1/datasets", content=trickle()))

    def forged_lines(self) -> None:
        forged = "1\n12:00:00 error: the database is lost\x1b[2K"
        self.post("/tinker/api/v1/create_session", {"sdk_version": forged})
        url = self.url.replace("http", "ws", 1) + "/wire/host"
        with connect(url, additional_headers={"X-API-Key": self.key}, open_timeout=30) as peer:
            offer = protocol.HostedEnvironment(name=forged)
            hello = protocol.HostHello(protocol=protocol.PROTOCOL, instance=secrets.token_hex(8), environments=[offer])
            peer.send(protocol.encode(hello))
            peer.recv(timeout=30)


ATTACKS: dict[str, tuple[str, dict[Callable[[Attacker], None], int]]] = {
    "C1": ("patterns that take all memory", {Attacker.patterns: 2}),
    "C2": ("512 episodes with 100 names of metrics each", {Attacker.metric_names: 1}),
    "C3": ("datasets of 1.5 M rows, and dry runs over them", {Attacker.datasets: 8}),
    "C4": ("stop texts of 12 MB", {Attacker.stops: 2}),
    "C5": ("roles of 7 MB", {Attacker.long_roles: 1}),
    "C6": ("576 bodies that never come", {Attacker.bodies_that_never_come: 1}),
    "C7": ("names and metadata of 15 MB", {Attacker.long_names: 2}),
    "C8": ("brackets, digits and empty messages", {Attacker.costly_bytes: 4}),
    "C9": ("GETs, dry runs and large JSON without a pause", {
        Attacker.many_gets: 8, Attacker.many_dry_runs: 4, Attacker.large_json: 4,
    }),
    "C10": ("200 slow readers and 50 slow uploads", {Attacker.slow_readers: 1, Attacker.slow_uploads: 50}),
    "C11": ("names with line ends and escapes", {Attacker.forged_lines: 2}),
}  # fmt: skip
"""By name: what it is, and each action with the threads that repeat it."""


def insist(attacker: Attacker, action: Callable[[], None], name: str = "") -> None:
    """Repeat an action, whatever it gets; its errors are counted under its ``name``."""
    while not attacker.stop.is_set():
        try:
            action()
        except Exception as error:
            attacker.answers[f"{name}: {type(error).__name__}" if name else type(error).__name__] += 1
            attacker.stop.wait(0.1)


@dataclass
class Victim:
    """Another tenant's figures."""

    client: rookery.Client
    stop: threading.Event = field(default_factory=threading.Event)
    gets: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def read(self) -> None:
        while not self.stop.wait(READ_SECONDS):
            began = time.monotonic()
            try:
                self.client.models()
            except Exception as error:
                self.wrong.append(f"GET: {error}")
            self.gets.append(time.monotonic() - began)

    def train(self) -> None:
        while not self.stop.is_set():
            last = None
            try:
                for kind, data in self.client.submit(small_job(random.randrange(2**31))).follow():
                    if kind == "metrics":
                        if last is not None:
                            self.steps.append(data.time - last)
                        last = data.time
                    elif kind == "end" and data.state != "completed":
                        self.wrong.append(f"a job {data.state}: {data.reason}")
                    if self.stop.is_set():
                        return
            except Exception as error:
                self.wrong.append(f"job: {error}")

    def taken(self) -> tuple[list[float], list[float]]:
        """GETs and steps since the last call."""
        gets, steps, self.gets, self.steps = self.gets, self.steps, [], []
        return gets, steps


def attack(name: str, url: str, key: str, niceness: int) -> None:
    """The attack's process: from a line on standard input until its end. Prints how often it got what."""
    attacker = Attacker(url, key, threading.Event())
    for body in LARGE_BODIES:
        large_body(body)
    print("ready", flush=True)
    sys.stdin.readline()
    actions = ATTACKS[name][1].items()
    insist_until_told(
        attacker, [(partial(action, attacker), "") for action, threads in actions for _ in range(threads)], niceness
    )


def insist_until_told(attacker: Attacker, actions: Iterable[tuple[Callable[[], None], str]], niceness: int) -> NoReturn:
    """Repeat each of these actions, with the name for its errors, in a thread of its own and at a low priority, until
    the end of standard input; then print how often the attacker got what, and exit."""
    lower_priority(niceness)
    for action, name in actions:
        threading.Thread(target=insist, args=(attacker, action, name), daemon=True).start()
    sys.stdin.read()
    attacker.stop.set()
    print(json.dumps(attacker.answers), flush=True)
    os._exit(0)  # some of its threads still wait for answers


@contextmanager
def attacking(name: str, url: str, key: str, niceness: int) -> Iterator[subprocess.Popen[str]]:
    """The process of an attack, which waits for a line."""
    arguments = ["--attack", name, url, key, "--niceness", str(niceness)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scale.callers", *arguments],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


def processor_seconds(town: Deployment) -> dict[str, float]:
    """Processor time since their start of the service, its worker, and the other processes that it has started; of the
    machine in all, and what the machine's host took from it."""
    assert town.service is not None
    service, found = psutil.Process(town.service.pid), {"service": 0.0, "worker": 0.0, "children": 0.0}
    for process in (service, *service.children(recursive=True)):
        with suppress(psutil.Error):
            times, command = process.cpu_times(), " ".join(process.cmdline())
            role = "service" if process == service else "worker" if "worker.process" in command else "children"
            found[role] += times.user + times.system
            found["children"] += times.children_user + times.children_system
    machine = psutil.cpu_times()
    return {**found, "machine": sum(machine) - machine.idle - machine.iowait - machine.guest, "stolen": machine.steal}


def measure(town: Deployment, victim: Victim, name: str, given: argparse.Namespace, result: Result) -> None:
    what, seconds = ATTACKS[name][0], given.seconds
    tenant = town.client.add_tenant(f"hostile-{name}").id
    key = str(town.client.add_key(tenant).key)
    assert town.service is not None
    service, peak, looks, training = psutil.Process(town.service.pid), 0, 0, 0
    worker, worker_peak = town.child("worker"), 0
    with attacking(name, town.url, key, given.niceness) as attacker:
        victim.taken()
        used = processor_seconds(town)
        time.sleep(seconds)
        middle = processor_seconds(town)
        gets_before, steps_before = victim.taken()
        before = service.memory_info().rss
        assert attacker.stdin is not None
        attacker.stdin.write("begin\n")
        attacker.stdin.flush()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            peak = max(peak, service.memory_info().rss)
            worker_peak = max(worker_peak, worker.memory_info().rss)
            looks += 1
            training += bool(town.rows("SELECT 1 FROM jobs WHERE tenant = ? AND state = 'running' LIMIT 1", tenant))
        gets, steps = victim.taken()
        end = processor_seconds(town)
        answers = json.loads(attacker.communicate(timeout=END_SECONDS)[0])
    budget = next(row.beat.gauges["worker_memory_budget_bytes"] for row in town.client.workers() if row.beat)
    town.client.delete_tenant(tenant, force=True)
    share = 1 + training / looks
    usual, slow = (statistics.median(found or [math.nan]) for found in (steps_before, steps))
    p99, p99_before = (sorted(found or [math.nan])[int(0.99 * (len(found) - 1))] for found in (gets, gets_before))
    ratio, grown = slow / usual / share, peak - before
    result.add(
        f"{name}: GET beside {what}", gets or [math.nan], "s", f"p99 {p99 * 1e3:.0f} ms, {p99_before * 1e3:.0f} before"
    )
    measured = f"{p99 * 1e3:.0f} ms, {ratio:.2f} x, {grown / 1e6:+.0f} MB"
    met = p99 <= GET_SECONDS and ratio <= FAIR_STEP and grown <= SERVICE_BYTES and worker_peak <= budget
    result.judge(f"{name} {what}: {TARGETS}", measured, met, f"{date.today().isoformat()}, {commit()}")
    got = ", ".join(f"{count} x {one}" for one, count in Counter(answers).most_common(6)) or "nothing yet"
    line = f"{name} {what}: GET p99 {p99_before * 1e3:.0f} -> {p99 * 1e3:.0f} ms, step {usual:.3f} -> {slow:.3f} s"
    line += f" ({ratio:.2f} x fair, which is {share:.2f} x), service {grown / 1e6:+.0f} MB,"
    line += f" worker {worker_peak / 1e6:.0f} of {budget / 1e6:.0f} MB, processor time"
    busy = {role: [(middle[role] - used[role]) / seconds, (end[role] - middle[role]) / seconds] for role in used}
    line += " in a second: " + ", ".join(f"{role} {first:.2f} -> {then:.2f}" for role, (first, then) in busy.items())
    result.notes.append(f"{line}; it got {got}.")
    print(result.notes[-1], flush=True)


def run(given: argparse.Namespace, folder: Path) -> Result:
    title = f"One caller against the rest, {date.today().isoformat()}, commit {commit()}, load {os.getloadavg()[0]:.0f}"
    result = Result("callers", title, command())
    place_model(folder)
    more = {"tenant_service_share": str(given.share)} if given.share else {}
    with Deployment(folder, folder / "cache", Path(MODEL), workers=1, **more) as town, ExitStack() as stack:
        wait_until(lambda: any(row.state == "serving" for row in town.client.workers()), "a worker serves")
        made = town.client.add_tenant("other")
        key = str(town.client.add_key(made.id).key)
        victim = Victim(stack.enter_context(rookery.Client(town.url, key)))
        threads = [threading.Thread(target=work, daemon=True) for work in (victim.read, victim.train)]
        for thread in threads:
            thread.start()
        time.sleep(WARM_SECONDS)
        for name in given.only:
            measure(town, victim, name, given, result)
            if given.save:
                store(result)
            time.sleep(given.seconds / 3)  # what the attack left behind ends
        victim.stop.set()
        for thread in threads:
            thread.join(10)
        result.judge(FAILURES, f"{len(victim.wrong)}", not victim.wrong)
        result.notes += sorted(set(victim.wrong))[:10]
        assert town.service is not None and town.service.poll() is None, town.log_tail("service")
    return result


def case(text: str) -> str:
    """The attack that a row, a verdict or a note concerns; empty for none."""
    return text.split()[0].rstrip(":") if text.split()[0].rstrip(":") in ATTACKS else ""


def merged(result: Result, stored: dict[str, Any] | None) -> Result:
    """The result with the stored cases that were not measured now, in order, and a verdict over all."""
    here = {case(verdict.target) for verdict in result.verdicts}
    if stored is not None:
        kept = [Verdict(**one) for one in stored["verdicts"] if case(one["target"]) not in {*here, ""}]
        result.verdicts += kept
        result.rows += [Row(**one) for one in stored["rows"] if case(one["what"]) not in here]
        result.notes += [note for note in stored["notes"] if case(note) not in {*here, ""}]
    order = {name: number for number, name in enumerate(ATTACKS)}
    result.rows.sort(key=lambda row: order[case(row.what)])
    result.notes.sort(key=lambda note: order.get(case(note), len(order)))
    cases = [verdict for verdict in result.verdicts if case(verdict.target)]
    missed = [f"{case(one.target)} {one.measured}" for one in cases if not one.met]
    measured = f"{len(cases) - len(missed)} of {len(cases)}" + (f"; not {'; '.join(missed)}" if missed else "")
    oldest = min((one.why for one in cases if one.why), default="")  # day and commit, as measure() writes them
    others = [verdict for verdict in result.verdicts if not case(verdict.target)]
    cases.sort(key=lambda verdict: order[case(verdict.target)])
    summary = f"one hostile caller, {len(cases)} attacks: {TARGETS}"
    result.verdicts = [*cases, Verdict(summary, measured, not missed, f"the oldest: {oldest}" if oldest else "")]
    result.verdicts += others
    return result


def store(result: Result) -> None:
    """Write what was measured so far to the result's file, whose other cases stay."""
    path = ResultFolders().path(result.name)
    merged(deepcopy(result), json.loads(path.read_text()) if path.exists() else None).save()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--only", nargs="*", choices=[*ATTACKS], default=[*ATTACKS])
    parser.add_argument("--share", type=float, help="ROOKERY_TENANT_SERVICE_SHARE, if not the default")
    parser.add_argument("--save", action="store_true", help="write results/callers.json; other attacks there stay")
    parser.add_argument("--attack", nargs=3, metavar=("NAME", "URL", "KEY"), help=argparse.SUPPRESS)
    parser.add_argument("--niceness", type=int, default=19, help="of the attacks' processes (default: 19)")
    given = parser.parse_args()
    if given.attack:
        name, url, key = given.attack
        attack(name, url, key, given.niceness)
    with tempfile.TemporaryDirectory(prefix="callers-") as folder:
        result = run(given, Path(folder))
    for verdict in result.verdicts:
        if verdict.met is False:
            print(verdict)
    if given.save:
        store(result)
    sys.exit(any(verdict.met is False for verdict in result.verdicts))


if __name__ == "__main__":
    main()
