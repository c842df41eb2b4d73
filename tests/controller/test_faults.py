"""Bad input and trouble, end to end: a real service, real sockets, real environment hosts. What goes wrong is said, is
counted, costs its own tenant alone, and is gone on from once it is mended."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file
from sqlalchemy import create_engine, text
from tests.support import faulty, peers
from tests.support.faces import MODEL, ThreadedWorker, job, served, write_model
from tests.support.small_model import save_small_model

import rookery
from rookery import protocol
from rookery.client import Client, Record
from rookery.client.job import Job
from rookery.errors import RookeryError, StorageFull
from rookery.server.launcher import EmbeddedService
from rookery.storage.artifacts import Artifacts
from rookery.tokenization.registry import model_folder
from rookery.worker.model.convert import prepare

PATIENCE = 120.0
"""Seconds after which a test that waits gives up: far more than anything here takes on a busy machine."""

PARTS: dict[str, Any] = {
    "policies": {"main": {"rank": 4, "targets": ["q"]}},
    "algorithm": {"group_size": 2, "groups_per_step": 2},
}


def tenants(service: EmbeddedService, *names: str) -> list[str]:
    """A key for each new tenant."""
    headers = {"X-API-Key": service.key}
    keys = []
    with httpx.Client(base_url=service.url, headers=headers, timeout=PATIENCE) as admin:
        for name in names:
            tenant = admin.post("/api/v1/tenants", json={"name": name}).json()["id"]
            keys.append(admin.post(f"/api/v1/tenants/{tenant}/keys", json={}).json()["key"])
    return keys


def worker(service: EmbeddedService, root: Path) -> ThreadedWorker:
    return ThreadedWorker.of(service)


def until(job: Job, state: str) -> Record:
    """The job as soon as it is in ``state``; fails if it ends, or pauses, otherwise."""
    for kind, view in job.follow():
        if kind in ("job", "end"):
            if view.state == state:
                return view
            assert view.state in ("queued", "running"), (view.name, view.state, view.reason)
    raise AssertionError(f"{job.name} is {job.show().state}")


# --- environments -----------------------------------------------------------------------------------------------------


class TooLong(faulty.Good):
    """Its prompts are longer than the model's context of 512 tokens."""

    def reset(self, prompt: Any, seed: int) -> Any:
        return [{"role": "user", "content": "x" * 600}]


class Mended(faulty.Together):
    """Raises until somebody mends it. What began before that on other prompts than the first raises later on."""

    def __init__(self) -> None:
        super().__init__()
        self.mended = threading.Event()
        self.began = threading.Semaphore(0)
        self.late = threading.Event()

    def step(self, reply: rookery.Reply) -> Any:
        if not self.mended.is_set():
            if self.prompt["number"] == 0:
                self.began.acquire()
            else:
                self.began.release()
                self.late.wait()
            raise RuntimeError("not yet")
        return super().step(reply)


class TooMuch(faulty.Good):
    """Rewards that are numbers, and that nothing can be computed with."""

    def step(self, reply: rookery.Reply) -> Any:
        return rookery.Step(reward=1.7e308, done=True)


class OddMetrics(faulty.Good):
    """Metrics that are none, of either sign."""

    def step(self, reply: rookery.Reply) -> Any:
        endless = math.inf if len(reply.tokens) % 2 else -math.inf
        return rookery.Step(reward=1.0, done=True, metrics={"share": math.nan, "endless": endless, "huge": 1.7e308})


class Parity(faulty.Good):
    """Rewards that differ within a group, whoever samples."""

    def step(self, reply: rookery.Reply) -> Any:
        return rookery.Step(reward=float(sum(reply.tokens) % 5), done=True)


@dataclass
class Troubled:
    """Ended or paused jobs by the name of their environment."""

    views: dict[str, Record]
    jobs: dict[str, Job]
    neighbour: Record
    health: Any


STUCK = faulty.Stuck()

PAUSED = {
    "raises-in-reset": (faulty.RaisesInReset(), {}, "RuntimeError: no beginning"),
    "raises-in-step": (faulty.RaisesInStep(), {}, "RuntimeError: no step"),
    "raises-in-prompts": (faulty.RaisesInPrompts(), {}, "RuntimeError: no prompts"),
    "nan": (faulty.NotANumber(), {}, "NotANumber.step gave the reward nan (float), expected a finite number ("),
    "too-much": (TooMuch(), {}, " add up to 1.7e+308 in turn 0, allowed"),
    "stuck": (STUCK, {"step_timeout": 4}, "step was not answered within 4 s"),
    "late": (faulty.SlowAsync(6), {"step_timeout": 4}, "step was not answered within 4 s"),
    "late-with-a-thread": (faulty.Slow(6), {"step_timeout": 4}, "step was not answered within 4 s"),
    "too-long": (TooLong(), {}, "the model's context is 512"),
    "no-messages": (faulty.WrongAnswers("empty"), {}, "reset gave no messages"),
}
"""Environments of which no episode can succeed: options, and what the job says when it pauses."""

GOES_ON = {
    "odd-metrics": (OddMetrics(), {}),
}
"""Environments whose jobs complete."""


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Troubled]:
    """All of them at once in one service, with a neighbour that is well."""
    root = tmp_path_factory.mktemp("troubled")
    with ExitStack() as stack:
        service = stack.enter_context(served(root, failure_rate_window=8))
        stack.enter_context(worker(service, root))
        keys = tenants(service, "unlucky", "neighbour")
        unlucky, neighbour = (stack.enter_context(Client(service.url, key)) for key in keys)
        STUCK.release.clear()
        stack.callback(STUCK.release.set)
        every = {**{name: case[:2] for name, case in PAUSED.items()}, **GOES_ON}
        jobs = {
            name: unlucky.train(
                name=name, base_model=MODEL, environment={"hosted": environment, **options}, stop={"steps": 4}, **PARTS
            )
            for name, (environment, options) in every.items()
        }
        beside = neighbour.submit(job(name="well", stop={"steps": 6}))
        views = {name: until(jobs[name], "paused") for name in PAUSED}
        views.update({name: jobs[name].wait(PATIENCE) for name in GOES_ON})
        yield Troubled(views, jobs, beside.wait(PATIENCE), neighbour._connection.call("GET", "/api/v1/health"))


@pytest.mark.parametrize("name", PAUSED)
def test_a_job_whose_episodes_fail_pauses_with_the_reason(troubled: Troubled, name: str) -> None:
    view = troubled.views[name]
    assert PAUSED[name][2] in view.reason and "\n" not in view.reason
    if name == "raises-in-prompts":  # there is no episode that could fail
        return
    assert " of the last " in view.reason and "episodes failed, most with: " in view.reason
    assert view.counters["episodes_failed"] >= 4 and view.counters["groups_failed"] >= 1
    assert view.step == 0
    episodes = troubled.jobs[name].trajectories(limit=100)
    said = {episode.error for episode in episodes if episode.state == "failed"}
    assert said and all(PAUSED[name][2] in error for error in said), said
    assert {event.kind for event in troubled.jobs[name].events()} >= {"state"}


def test_metrics_that_are_no_numbers_stop_nothing(troubled: Troubled) -> None:
    assert (troubled.views["odd-metrics"].state, troubled.views["odd-metrics"].step) == ("completed", 4)
    for row in troubled.jobs["odd-metrics"].metrics(follow=False):
        assert row["reward"] == 1.0 and row["zero_variance_share"] == 1.0
        assert row["reward/share"] is row["reward/endless"] is None and row["reward/huge"] == 1.7e308
        assert (row["reward_episodes/share"], row["reward_episodes/huge"]) == (0.0, row["episodes"])


def test_a_job_next_to_failing_jobs_is_not_affected(troubled: Troubled) -> None:
    view = troubled.neighbour
    assert (view.state, view.step) == ("completed", 6)
    assert not view.counters.get("episodes_failed")
    totals = troubled.health["totals"]
    assert totals["episodes_failed"] >= sum(v.counters.get("episodes_failed", 0) for v in troubled.views.values())


def test_a_job_resumes_once_its_environment_is_repaired(tmp_path: Path) -> None:
    with ExitStack() as stack:
        service = stack.enter_context(served(tmp_path, failure_rate_window=4))
        stack.enter_context(worker(service, tmp_path))
        with Client(service.url, service.key) as client:
            environment = Mended()
            stack.callback(environment.late.set)
            stack.callback(environment.began.release, 2)
            mended = client.train(base_model=MODEL, environment=environment, stop={"steps": 3}, shuffle=False, **PARTS)
            assert "RuntimeError: not yet" in until(mended, "paused").reason
            environment.mended.set()
            environment.late.set()  # what was under way when it paused fails, too, and that stops nothing
            mended.resume()
            view = mended.wait(PATIENCE)
            assert (view.state, view.step) == ("completed", 3)
            ordinals = {episode.ordinal for episode in mended.trajectories(limit=1000)}
            assert ordinals == set(range(len(ordinals))), "no prompt was skipped"


# --- models that cannot be served -------------------------------------------------------------------------------------


def test_a_folder_that_is_no_model_and_a_type_that_is_not_supported_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "no_such"}')
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text('{"model_type": ')
    expected = {
        str(tmp_path / "empty"): "is not a model: it has no config.json",
        str(tmp_path / "strange"): "has model_type 'no_such', which the installed transformers does not know",
        str(tmp_path / "torn"): "is not JSON",
        str(tmp_path / "gone"): "is not a folder on this machine",
        "~nobody-of-this-name/x": "is not a folder on this machine",
        "/" + 300 * "b": "is not a folder on this machine",
        "smollm2-135m-instruckt": "did you mean smollm2-135m-instruct",
        "": "base_model",
    }
    with (
        served(tmp_path) as service,
        httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as client,
    ):
        for model, said in expected.items():
            for path in ("/api/v1/jobs", "/api/v1/jobs/dry-run"):
                response = client.post(path, json=job(base_model=model))
                assert response.status_code == 422, response.text
                assert said in response.json()["error"] and "\n" not in response.json()["error"]
        assert client.get("/api/v1/jobs").json() == []


def test_numbers_out_of_range_are_refused_as_mistakes_of_the_user(tmp_path: Path) -> None:
    with (
        served(tmp_path) as service,
        httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as client,
    ):
        made = client.post("/api/v1/jobs", json=job(environment={"hosted": "nobody"})).json()["id"]
        huge = 2**70
        for changes in (
            {"seed": huge},
            {"policies": {"main": {"seed": huge}}},
            {"policies": {"main": {"warm_start": {"job": made, "version": huge}}}},
            {"evaluation": {"prompts": 1, "seed": huge}},
            {"evaluation": {"prompts": huge}},
            {"sampling": {"max_tokens": huge}},
            {"algorithm": {"groups_per_step": huge}},
            {"algorithm": {"kl_weight": float("1e400")}},
            {"stop": {"reward": float("1e400")}},
        ):
            content = json_with_infinity(job(**changes))
            response = client.post("/api/v1/jobs", content=content, headers={"Content-Type": "application/json"})
            assert response.status_code == 422, (changes, response.text)
        for path in (
            f"jobs/{made}/policies/main/versions/²/adapter",
            f"jobs/{made}/policies/main/versions/{huge}/adapter",
            f"jobs/{made}/policies/main/versions/{'9' * 1900}/adapter",
            f"jobs/{made}/policies/main/versions/-1/adapter",
            f"jobs/{made}/policies/%01/versions",
            "jobs/%00",
        ):
            assert client.get(f"/api/v1/{path}").status_code == 404, path
        assert client.get(f"/api/v1/jobs/{'9' * 5000}").status_code == 414
        for query in (f"version={huge}", "version=-1", f"limit={huge}"):
            assert client.get(f"/api/v1/jobs/{made}/trajectories?{query}").status_code == 422, query
        for version, code, said in (
            ("²", 400, "after the @ comes a version's number, or latest"),
            (str(huge), 400, "after the @ comes a version's number, or latest"),
            ("-1", 400, "after the @ comes a version's number, or latest"),
            ("9" * 5000, 422, "target: String should have at most 4096 characters"),
        ):
            asked = {"target": f"{made}@{version}", "messages": [{"role": "user", "content": "?"}]}
            answer = client.post("/api/v1/sample", json=asked)
            assert answer.status_code == code and said in answer.json()["error"], (version, answer.text)
        assert len(client.get("/api/v1/jobs").json()) == 1


def json_with_infinity(data: Any) -> bytes:
    """JSON that says Infinity, as Python's own does."""
    return json.dumps(data).encode()


# --- numbers that are none, in a real worker --------------------------------------------------------------------------


@dataclass
class Learned:
    """A job that ended on a real worker, and the weights of its versions."""

    view: Record
    rows: list[Record]
    versions: list[dict[str, np.ndarray]]
    replies: list[list[Any]]
    """(ordinal, version, tokens) of every episode, in order."""


def learned(job: Job, folder: Path) -> Learned:
    view = job.wait(PATIENCE)
    versions = [
        load_file(job.adapter(version.version).download(folder / f"{job.id}-{version.version}") / WEIGHTS)
        for version in job.versions()
    ]
    episodes = job.trajectories(limit=1000)
    replies = sorted([e.ordinal, e.version, [t.tokens for t in e.trajectories]] for e in episodes)
    return Learned(view, list(job.metrics(follow=False)), versions, replies)


WEIGHTS = "adapter_model.safetensors"

REAL: dict[str, Any] = {
    "base_model": MODEL,
    "algorithm": {"group_size": 3, "groups_per_step": 2},
    "sampling": {"max_tokens": 8},
    "checkpoints": {"keep_last": 10},
    "shuffle": False,
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Learned]]:
    """Jobs of four tenants on one real worker with a small random model: first ``alone``, then the same job ``beside``
    those whose numbers leave what a number holds and one whose rewards are all equal."""
    root = tmp_path_factory.mktemp("real")
    prepared = prepare(str(save_small_model(root / "small")), root / "cache")
    shutil.copytree(prepared, model_folder(root / "cache", MODEL))
    policies = {"main": {"rank": 4}}
    with ExitStack() as stack:
        service = stack.enter_context(served(root, models=MODEL, workers=1, threads=1, worker_wait_seconds=PATIENCE))
        clients = [
            stack.enter_context(Client(service.url, key)) for key in tenants(service, "well", "wild", "torn", "even")
        ]

        def begun(number: int, name: str, environment: Any, **parts: Any) -> Job:
            spec = {**REAL, "policies": policies, "stop": {"steps": 2}, **parts}
            return clients[number].train(name=name, environment=environment, **spec)

        found = {"alone": learned(begun(0, "alone", Parity()), root)}
        jobs = {
            "wild": begun(1, "wild", Parity(), policies={"main": {"rank": 4, "alpha": 1e38}}, stop={"steps": 3}),
            "torn": begun(2, "torn", Parity(), algorithm={**REAL["algorithm"], "kl_weight": 3.3e38}, stop={"steps": 3}),
            "even": begun(3, "even", OddMetrics()),
            "beside": begun(0, "beside", Parity()),
        }
        found.update({name: learned(job, root) for name, job in jobs.items()})
        yield found


@pytest.mark.heavy
@pytest.mark.parametrize(("name", "trained"), [("wild", 0), ("torn", 1)])
def test_a_step_without_a_number_is_skipped_and_flagged(real: dict[str, Learned], name: str, trained: int) -> None:
    """The policy is the base model in the first step, so that any weight times its divergence from the base is 0."""
    bad = real[name]
    assert (bad.view.state, bad.view.step) == ("completed", 3), bad.view.reason
    assert bad.view.counters["steps_skipped"] == 3 - trained
    assert [row["skipped"] for row in bad.rows] == [0] * trained + [1] * (3 - trained)
    assert len(bad.versions) == 4, "a step that changed nothing is a step"
    last = bad.versions[trained]
    for version in bad.versions[trained + 1 :]:
        assert all(np.array_equal(version[name], weight) for name, weight in last.items())


@pytest.mark.heavy
def test_a_skipped_step_leaves_other_jobs_steps_untouched(real: dict[str, Learned]) -> None:
    alone, beside = real["alone"], real["beside"]
    for one in (alone, beside):
        assert (one.view.state, one.view.step) == ("completed", 2)
        assert not one.view.counters.get("steps_skipped") and [row["skipped"] for row in one.rows] == [0, 0]
    first = [[reply for reply in one.replies if reply[1] == 0] for one in (alone, beside)]
    assert first[0] and first[0] == first[1], "the same text"
    lr = 3e-4
    for name, weight in alone.versions[1].items():
        assert np.abs(weight - alone.versions[0][name]).max() > 0 or "lora_A" in name
        assert np.abs(weight - beside.versions[1][name]).mean() < 0.01 * lr, name


@pytest.mark.heavy
def test_equal_rewards_are_counted_and_have_no_gradient(real: dict[str, Learned]) -> None:
    even = real["even"]
    assert (even.view.state, even.view.step, even.view.counters["zero_variance_groups"]) == ("completed", 2, 4)
    assert [row["zero_variance_share"] for row in even.rows] == [1.0, 1.0]
    for version in even.versions[1:]:
        assert all(np.array_equal(version[name], weight) for name, weight in even.versions[0].items())


# --- artifacts that are not what their hash says ----------------------------------------------------------------------


class Gated(faulty.Together):
    """Waits from the prompt of that number on until the gate opens. Its rewards differ within a group."""

    begins = 6

    def __init__(self) -> None:
        super().__init__(prompts=40)
        self.gate = threading.Event()

    def step(self, reply: rookery.Reply) -> Any:
        if self.prompt["number"] >= self.begins:
            self.gate.wait()
        return super().step(reply)


def test_a_corrupt_version_is_refused_and_the_one_before_it_used(tmp_path: Path) -> None:
    gated = Gated()
    with ExitStack() as stack:
        stack.callback(gated.gate.set)
        service = stack.enter_context(served(tmp_path))
        stack.enter_context(worker(service, tmp_path))
        client = stack.enter_context(Client(service.url, service.key))
        made = client.train(
            base_model=MODEL, environment=gated, stop={"steps": 5}, shuffle=False, name="gated", **PARTS
        )
        for row in made.metrics():
            if row.step == 3:
                break
        made.pause()
        head = corrupted(tmp_path, Artifacts(tmp_path / "data" / "artifacts"))
        with pytest.raises(RookeryError, match="does not have the hash"):
            made.adapter().download(tmp_path / "adapter")
        made.resume()
        gated.gate.set()
        view = made.wait(PATIENCE)
        assert (view.state, view.step) == ("completed", 5), view.reason
        said = [event.text for event in made.events() if event.kind == "corrupt"]
        assert len(said) == 1 and "version 3 of main is corrupt" in said[0] and "went back to version 2" in said[0]
        versions = made.versions()
        assert [version.version for version in versions] == list(range(len(versions)))
        assert versions[3].lost and not versions[3].kept and versions[3].hash == head
        assert (versions[4].parent, versions[4].step) == (2, 3)
        assert [row.step for row in made.metrics(follow=False)] == [1, 2, 3, 4, 5]


def corrupted(root: Path, artifacts: Artifacts) -> str:
    """Damages the newest version's weights, keeping their size; its hash."""
    engine = create_engine(f"sqlite:///{root}/data/rookery.db")
    with engine.begin() as connection:
        digest: str = connection.execute(text("select hash from versions order by version desc limit 1")).scalar_one()
    engine.dispose()
    path = artifacts.path(digest, "adapter_model.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    return digest


# --- a full disk ------------------------------------------------------------------------------------------------------


def on_a_small_disk(root: Path) -> None:
    """Runs in a process of its own, whose ``root`` is a file system of a few megabytes."""
    filler = root / "filler"

    def fill() -> None:
        with filler.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        with filler.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"\0")

    write_model(root / "cache")
    gated = Gated()
    small = served(root, outage_retry_seconds=0.2)
    with small as service, worker(service, root), Client(service.url, service.key) as client:
        made = client.train(
            base_model=MODEL, environment=gated, stop={"steps": 5}, shuffle=False, name="gated", **PARTS
        )
        for row in made.metrics():
            if row.step == 3:
                break
        fill()
        gated.gate.set()
        view = until(made, "paused")
        assert "full" in view.reason and "free some space" in view.reason, view.reason
        filler.unlink()
        view = made.wait(PATIENCE)  # nobody resumes it
        assert (view.state, view.step) == ("completed", 5), view.reason
        versions = made.versions()
        assert [version.step for version in versions] == [0, 1, 2, 3, 4, 5]
        assert [row.step for row in made.metrics(follow=False)] == [1, 2, 3, 4, 5]
        groups = {e.ordinal: e.group_state for e in made.trajectories(limit=1000)}
        assert sorted(groups) == list(range(len(groups)))
        assert list(groups.values()).count("consumed") == 10
        assert not list((root / "data" / "artifacts" / ".staging").iterdir())
    print("went on")


async def test_an_upload_that_finds_no_room_pauses_its_job(tmp_path: Path) -> None:
    """The worker is told HTTP 507 and gives up; that is no fault of its own, and tried again by nobody else."""
    service = peers.Service(tmp_path)
    await service.start()
    scripted, _ = await service.join()

    async def refused(op: Any) -> protocol.OperationDone | None:
        staging = scripted.tickets.staging(op.upload) if isinstance(op, protocol.OptimStep) else None
        if staging is None or op.parent.version == 0:
            return None
        staging.full = StorageFull("the disk of the artifacts is full; free some space")
        return protocol.OperationDone(epoch=0, op=op.op, error="PUT: the service's disk is full", category="lost")

    scripted.answer = refused
    view, _ = await service.controller.submit("alice", peers.job_of(stop__steps=3))
    paused = await service.ends(view.id, "paused")
    assert (paused.reason, paused.step) == ("the disk of the artifacts is full; free some space", 1)
    assert sum(isinstance(op, protocol.OptimStep) for op in scripted.operations) == 2
    scripted.answer = None
    await service.controller.resume("alice", view.id)
    assert (await service.ends(view.id)).step == 3
    service.check_history(view.id)
    await service.close()


def test_a_full_disk_pauses_jobs_until_there_is_room(tmp_path: Path) -> None:
    probe = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True)
    if probe.returncode != 0:
        pytest.skip("this machine does not let its user mount a small file system (unshare -rm)")
    mount_and_run = f'mount -t tmpfs -o size=8m none "{tmp_path}" && exec "$0" -c "$1" "{tmp_path}"'
    code = (
        "import sys; from pathlib import Path; from tests.controller.test_faults import on_a_small_disk as run;"
        " run(Path(sys.argv[1]))"
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount_and_run, sys.executable, code],
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("went on\n")
