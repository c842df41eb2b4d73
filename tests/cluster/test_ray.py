"""Workers on the nodes of a real Ray cluster, which has several nodes on this machine (``make test-ray``)."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from benchmarks.lib.harness import Result
from tests.support.clusters import job_of_texts
from tests.support.ports import free_port
from tests.support.small_model import save_small_model
from tests.support.waiting import PATIENCE_SECONDS, until

from rookery import Client, Job
from rookery.cluster.ray import RayActors
from rookery.cluster.supervisor import Child
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'rookery[ray]'")

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

MANY_KILLS = 50
"""Kills of which a run writes ``benchmarks/results/chaos_ray.json``."""
NAMED = {
    "node": "a node", "raylet": "a node's raylet", "actor": "an actor", "worker": "a worker's process",
    "reserved": "a reserved worker's process",
}  # fmt: skip
KILLS = int(os.environ.get("ROOKERY_RAY_KILLS", "4"))
STEPS = 12
SPOT = {"labels": {"pool": "spot"}, "num_cpus": 1}
HEALTH = {"health_check_period_ms": 500, "health_check_failure_threshold": 4, "health_check_initial_delay_ms": 0}
"""Ray's own default takes 14 s to notice a lost node; Rookery's heartbeats do not wait for it."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head with room for one reserved worker. Tests add nodes."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_AUTH_MODE"] = "disabled"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": HEALTH})
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_small_model(tmp_path_factory.mktemp("model") / "small"))


@pytest.fixture
def service(tmp_path: Path, nodes: Any, model: str) -> Iterator[EmbeddedService]:
    settings = Settings.load(
        {"ROOKERY_DATA": str(tmp_path / "data"), "ROOKERY_CACHE": str(tmp_path / "cache")},
        port=0, models=model, cluster="ray", ray_address=nodes.address, ray_spot_workers=1,
    )  # fmt: skip
    with EmbeddedService(settings) as running:
        yield running


@pytest.fixture
def client(service: EmbeddedService) -> Iterator[Client]:
    with Client(service.url, service.key) as client:
        yield client


def serving(client: Client, kind: str) -> list[Any]:
    return [worker for worker in client.workers() if worker.state == "serving" and worker.kind == kind]


def state_of(client: Client, name: str) -> str:
    return next((worker.state for worker in client.workers() if worker.name == name), "gone")


def requested(client: Client) -> bool:
    return any(worker.requests for worker in serving(client, "preemptible"))


def texts(of: Job) -> list[tuple[int, str]]:
    """Of all episodes that were trained on, in any order of their ends."""
    return sorted((episode.ordinal, str(episode.messages)) for episode in of.trajectories(limit=1000))


def test_nodes_join_and_vanish_while_a_job_runs(client: Client, nodes: Any, model: str) -> None:
    """A node's worker serves in the middle of a step; a killed one costs nothing that was received."""
    until(lambda: serving(client, "reserved"), "no reserved worker")
    assert not serving(client, "preemptible")  # it waits for a node
    quiet = client.submit(job_of_texts(model, STEPS))
    quiet.wait(PATIENCE_SECONDS)

    node = nodes.add_node(**SPOT)
    spot = until(lambda: serving(client, "preemptible"), "the node's worker does not serve")[0]
    assert "@" in spot.name  # the node's address and the actor
    disturbed = client.submit(job_of_texts(model, STEPS))
    until(lambda: requested(client), "the node gets no request")
    nodes.remove_node(node, allow_graceful=False)
    ended = disturbed.wait(PATIENCE_SECONDS)
    assert (quiet.show().state, ended.state, ended.reason) == ("completed", "completed", f"{STEPS} steps")
    assert len(texts(quiet)) == 16 * STEPS and texts(quiet) == texts(disturbed)

    node = nodes.add_node(**SPOT)
    until(lambda: serving(client, "preemptible"), "no worker returned with the next node")
    nodes.remove_node(node)


@pytest.mark.timeout(300 + 60 * KILLS)
def test_random_kills_of_nodes_raylets_actors_and_workers_lose_nothing(client: Client, nodes: Any, model: str) -> None:
    """A job runs at each kill: when one has ended, the next begins. All of them equal the undisturbed one, whose texts
    are read at once, as those of the next job's: the service keeps the latest only."""
    source, kills, began = random.Random(5), Counter[str](), time.monotonic()
    until(lambda: serving(client, "reserved"), "no reserved worker")
    quiet = client.submit(job_of_texts(model, STEPS))
    quiet.wait(PATIENCE_SECONDS)
    expected = texts(quiet)
    assert len(expected) == STEPS * 16
    disturbed: list[Job] = []

    def equals_quiet(ended: Job) -> None:
        assert ended.wait(PATIENCE_SECONDS).reason == f"{STEPS} steps"
        assert [(v.version, v.parent) for v in ended.versions()] == [(0, None), *((n + 1, n) for n in range(STEPS))]
        assert texts(ended) == expected

    while kills.total() < KILLS:
        node = nodes.add_node(**SPOT)
        until(lambda: serving(client, "preemptible"), "no worker on the node")
        if not disturbed or disturbed[-1].show().state != "running":
            if disturbed:
                equals_quiet(disturbed[-1])
            disturbed.append(client.submit(job_of_texts(model, STEPS)))
            until(lambda: requested(client), "the node gets no request")
        time.sleep(source.random())
        victim = source.choice(["node", "raylet", "actor", "worker", "reserved"])
        kills[victim] += 1
        match victim:
            case "raylet":
                node.kill_raylet()
            case "actor" | "worker" | "reserved":
                for worker in serving(client, "reserved" if victim == "reserved" else "preemptible"):
                    process = psutil.Process(worker.pid)
                    (process.parent() if victim == "actor" else process).kill()
        nodes.remove_node(node, allow_graceful=victim != "node")
    equals_quiet(disturbed[-1])
    seconds = time.monotonic() - began
    print(f"{dict(kills)} over {len(disturbed)} jobs of {STEPS} steps in {seconds:.0f} s")
    if KILLS >= MANY_KILLS:
        result = Result("chaos_ray", "Kills on a Ray cluster while jobs train", "make chaos-ray")
        for victim, count in sorted(kills.items()):
            result.add(f"kills of {NAMED[victim]}", [count], "")
        result.add("all of it", [seconds], "s", f"{len(disturbed)} jobs of {STEPS} steps, one after another")
        result.judge(
            f"{KILLS} random kills on a Ray cluster: texts and versions of all jobs equal the undisturbed one's",
            f"{len(disturbed)} of {len(disturbed)} jobs", met=True,
        )  # fmt: skip
        result.save()


def test_draining_node_has_its_workers_drained(client: Client, nodes: Any) -> None:
    node = nodes.add_node(**SPOT)
    worker = until(lambda: serving(client, "preemptible"), "no worker on the node")[0]
    command = [
        "drain-node", "--address", nodes.address, "--node-id", node.node_id, "--reason",
        "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", "60",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *command], check=True, capture_output=True)
    leaving = ("draining", "gone")  # a lost one would be suspect
    until(lambda: state_of(client, worker.name) in leaving, "it is not drained")
    nodes.remove_node(node, allow_graceful=False)


def test_workers_return_with_the_head(tmp_path: Path, model: str) -> None:
    from ray.cluster_utils import Cluster

    os.environ["RAY_AUTH_MODE"] = "disabled"
    port = free_port()
    arguments = {"num_cpus": 1, "gcs_server_port": port, "_system_config": HEALTH}
    first = Cluster(initialize_head=True, head_node_args=arguments)
    settings = Settings.load(
        {"ROOKERY_DATA": str(tmp_path / "data"), "ROOKERY_CACHE": str(tmp_path / "cache")},
        port=0, models=model, cluster="ray", ray_address=first.address,
    )  # fmt: skip
    with EmbeddedService(settings) as service, Client(service.url, service.key) as client:
        before = until(lambda: serving(client, "reserved"), "no worker")[0]
        started = client.submit(job_of_texts(model))
        first.remove_node(first.head_node, allow_graceful=False)
        first.shutdown()
        until(lambda: not serving(client, "reserved"), "the worker outlives the head")
        for log in (tmp_path / "data" / "logs").glob("ray-*.log"):  # also where it is away for longer than a restart
            until(lambda: "no Ray cluster answers" in log.read_text(), f"{log} has no look at the head")  # noqa: B023
        second = Cluster(initialize_head=True, head_node_args=arguments)
        try:
            after = until(lambda: serving(client, "reserved"), "no worker returned")[0]
            assert after.name != before.name
            assert started.wait(PATIENCE_SECONDS).reason == "3 steps"
        finally:
            second.shutdown()


REPORTS = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with open(os.environ["REPORTS"], "a") as file:
    print(sys.argv[1], os.environ.get("CUDA_VISIBLE_DEVICES", "none"), os.getpid(), file=file)
sys.stdin.read()
"""


class Reports:
    """Workers that report each of their starts."""

    def __init__(self, folder: Path) -> None:
        (folder / "reports.py").write_text(REPORTS)
        self._path = folder / "reports"
        self._environment = {"PYTHONPATH": str(folder), "REPORTS": str(self._path)}

    def child(self, name: str) -> Child:
        return Child(name, ["reports", name], self._environment)

    def of(self, name: str) -> list[list[str]]:
        """The GPUs and the process of each start of this worker."""
        lines = [line.split() for line in self._path.read_text().splitlines()] if self._path.exists() else []
        return [line[1:] for line in lines if line[0] == name]

    async def start(self, name: str, gpus: str, more_than: int) -> int:
        """Wait for a start with these GPUs that is not among the first ``more_than``; their number then."""
        await asyncio.to_thread(
            until, lambda: len(found := self.of(name)) > more_than and found[-1][0] == gpus,
            lambda: (name, self.of(name)),
        )  # fmt: skip
        return len(self.of(name))


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("without_gpus")
async def test_workers_get_the_gpus_of_nodes_that_join_later(tmp_path: Path) -> None:
    """Reserved ones move to them; a preemptible one returns with the only node that has one, and has it reserved."""
    from ray.cluster_utils import Cluster

    reports = Reports(tmp_path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": HEALTH})
    try:
        ray.init(address=cluster.address, namespace="gpus", configure_logging=False, log_to_driver=False)
        settings = Settings.load({}, data=tmp_path, cache=tmp_path, ray_spot_workers=1, drain_seconds=1)
        children = [reports.child("reserved")], [reports.child("spot")]
        actors = RayActors(settings, *children, [], lambda nodes: None)
        ended = asyncio.create_task(actors.run())
        count = await reports.start("reserved", "none", 0)
        cluster.add_node(num_cpus=1, num_gpus=1)  # Ray sets signal handlers: this is the main thread
        count = await reports.start("reserved", "0", count)
        psutil.Process(int(reports.of("reserved")[-1][1])).kill()
        await reports.start("reserved", "0", count)
        for count in (0, len(reports.of("spot"))):
            node = cluster.add_node(**SPOT, num_gpus=1)
            await reports.start("spot", "0", count)
            cluster.remove_node(node, allow_graceful=False)
        actors.stopped.set()
        assert await ended == ""
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.usefixtures("without_gpus")
@pytest.mark.parametrize("runs", [False, True])
async def test_a_worker_moves_to_the_gpu_whose_node_it_fills(tmp_path: Path, runs: bool) -> None:
    """The only node that has room for it joins with a GPU: Ray starts it there without one, as it was asked before.
    With ``runs`` it is there when this process learns of the GPU."""
    from ray.cluster_utils import Cluster

    reports = Reports(tmp_path)
    head = {"num_cpus": 4 if runs else 0, "num_gpus": int(runs), "_system_config": HEALTH}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, namespace="gpus", configure_logging=False, log_to_driver=False)
        settings = Settings.load({}, data=tmp_path, cache=tmp_path, ray_cpus=3, drain_seconds=1)
        actors = RayActors(settings, [reports.child("reserved")], [], [], lambda nodes: None)
        look, sees = actors.look, asyncio.Event()
        actors.look = lambda nodes: look(nodes) if sees.is_set() else None  # type: ignore[method-assign]
        ended = asyncio.create_task(actors.run())
        if runs:
            await reports.start("reserved", "none", 0)
        else:
            cluster.add_node(num_cpus=4, num_gpus=1)
        sees.set()
        await reports.start("reserved", "0", 0)
        actors.stopped.set()
        assert await ended == ""
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.parametrize("listens", [False, True])
def test_address_without_a_cluster_is_refused_in_one_line(tmp_path: Path, listens: bool) -> None:
    """Also one where another program listens: a real HTTP server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port if listens else 1}"
        command = [sys.executable, "-m", "rookery.cli", "serve", "--cluster", "ray", "--address", address]
        environment = {**os.environ, "ROOKERY_DATA": str(tmp_path), "ROOKERY_PORT": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        server.shutdown()
    assert done.returncode == 1, "the head may be started later"
    assert f"ray_address {address}: no Ray cluster answers" in done.stderr and "ray start --head" in done.stderr
    assert "Traceback" not in done.stderr


TRAINING = """
import sys
from rookery import Client
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings

spec = {spec!r}
with EmbeddedService(Settings.load(port=0, models=spec["base_model"], cluster="ray")) as service:
    with Client(service.url, service.key) as client:
        print(client.submit(spec).wait({patience}).reason)
"""


def test_a_job_runs_from_ray_job_submit(tmp_path: Path, model: str) -> None:
    from ray.cluster_utils import Cluster

    os.environ["RAY_AUTH_MODE"] = "disabled"
    port = free_port()
    head = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": port, "_system_config": HEALTH}
    head["dashboard_agent_listen_port"] = free_port()  # the other head's agent has the default one
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        script = tmp_path / "train.py"
        script.write_text(TRAINING.format(spec=job_of_texts(model), patience=PATIENCE_SECONDS))
        folders = {"ROOKERY_DATA": str(tmp_path / "data"), "ROOKERY_CACHE": str(tmp_path / "cache")}
        variables = json.dumps({"env_vars": folders})
        command = ["job", "submit", "--address", f"http://127.0.0.1:{port}", "--runtime-env-json", variables, "--"]
        command += [sys.executable, str(script)]

        def submitted() -> subprocess.CompletedProcess[str] | None:
            """None before the head's agent is up."""
            scripts = [sys.executable, "-m", "ray.scripts.scripts", *command]
            done = subprocess.run(scripts, capture_output=True, text=True, check=False)
            return None if "No available agent" in done.stdout + done.stderr else done

        done = until(submitted, "no agent takes the job")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "3 steps" in done.stdout
    finally:
        cluster.shutdown()


OTHER = """
import sys, ray
from rookery.cluster.ray import scale_to
ray.init(address=sys.argv[1], configure_logging=False, log_to_driver=False)
scale_to([({"CPU": 2.0}, {"pool": "other"})])
sys.stdin.readline()
scale_to([])
"""


@pytest.mark.usefixtures("without_gpus")
def test_the_autoscaler_is_asked_for_the_nodes_of_all_workers(tmp_path: Path, model: str) -> None:
    """Ray has one request: those of several base models are joined. It ends with the service."""
    from ray._raylet import GcsClient
    from ray.autoscaler.v2.sdk import get_cluster_resource_state
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_enable_autoscaler_v2", "1")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": HEALTH})
        gcs = GcsClient(cluster.address)

        def requested_nodes() -> list[tuple[int, dict[str, float], list[tuple[str, list[str]]]]]:
            """(how many, resources, (label, its values) of the node) of each kind of worker."""
            found = []
            for constraint in get_cluster_resource_state(gcs).cluster_resource_constraints:
                for counted in constraint.resource_requests:
                    selectors = [
                        (one.label_key, list(one.label_values))
                        for selector in counted.request.label_selectors
                        for one in selector.label_constraints
                    ]
                    found.append((counted.count, dict(counted.request.resources_bundle), selectors))
            return sorted(found, key=str)

        own = [(1, {"CPU": 1.0}, [("pool", ["spot"])]), (2, {"CPU": 1.0}, [("pool", ["spot"])])]
        both = [*own, (1, {"CPU": 2.0}, [("pool", ["other"])])]
        settings = Settings.load(
            {"ROOKERY_DATA": str(tmp_path / "data"), "ROOKERY_CACHE": str(tmp_path / "cache")},
            port=0, models=model, cluster="ray", ray_address=cluster.address, ray_spot_workers=2,
        )  # fmt: skip
        try:
            with EmbeddedService(settings):
                until(lambda: requested_nodes() == sorted(own, key=str), requested_nodes)
                other = subprocess.Popen([sys.executable, "-c", OTHER, cluster.address], stdin=subprocess.PIPE)
                until(lambda: requested_nodes() == sorted(both, key=str), requested_nodes)
                other.communicate(b"\n")
                until(lambda: requested_nodes() == sorted(own, key=str), requested_nodes)
            until(lambda: not requested_nodes(), requested_nodes)
        finally:
            cluster.shutdown()


REQUESTS = """
import json, sys, time
import ray
from ray.experimental import internal_kv as kv
from rookery.cluster import ray as ours

ray.init(address=sys.argv[1], configure_logging=False, log_to_driver=False)
other = ours.REQUESTS + b"other"

def is_kept(repeat):
    wanted = [({"CPU": 1.0}, {})]
    kv._internal_kv_put(other, json.dumps({"time": 0.0, "repeat": repeat, "wanted": wanted}).encode(), overwrite=True)
    ours.scale_to([])
    return kv._internal_kv_get(other) is not None

ours.FORGOTTEN_SECONDS = 0.2
kept = [is_kept(0)]
for repeat in (1, 2, 2):
    time.sleep(0.4)
    kept.append(is_kept(repeat))
print(kept)
"""


def test_a_request_for_nodes_ends_where_it_is_not_repeated_by_any_clock(nodes: Any) -> None:
    done = subprocess.run([sys.executable, "-c", REQUESTS, nodes.address], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["[True, True, True, False]"], done.stdout + done.stderr
