"""Sinks of jobs against the unmodified MLflow server, read by MLflow's own client."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.controller.test_job_sinks import client_of, sink_events, submitted
from tests.server.test_api import end_of
from tests.support.faces import ThreadedWorker, served
from tests.support.ports import free_port
from tests.support.waiting import until, until_healthy

from rookery.controller.job_sinks import Endpoint
from rookery.controller.mlflow import MlflowRun
from rookery.controller.sink_run import batches
from rookery.settings import Settings
from rookery.spec.job import SinkSpec
from rookery.turns import in_thread

BIN = Path(__file__).parents[2] / ".bench" / "sinks" / "bin"

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not (BIN / "mlflow").exists(), reason="mlflow is not here: make test-sinks"),
]

READ = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
experiment = client.get_experiment_by_name(sys.argv[2])
found = []
for run in client.search_runs([experiment.experiment_id]) if experiment else []:
    series = {key: [[one.step, one.value] for one in client.get_metric_history(run.info.run_id, key)]
              for key in run.data.metrics if "timing/" not in key}
    found.append({"status": run.info.status, "name": run.info.run_name, "tags": run.data.tags,
                  "params": run.data.params, "series": series, "metrics": len(run.data.metrics)})
print(json.dumps(found))
"""


@contextmanager
def mlflow(folder: Path, port: int) -> Iterator[str]:
    """A server; it is killed at the end, and the next one in the folder continues."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # eight processes that nothing here needs
    url = f"http://127.0.0.1:{port}"
    command = [
        BIN / "python", "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    with (folder / "mlflow.log").open("ab") as log:
        process = subprocess.Popen(
            list(map(str, command)), env=environment, stdout=log, stderr=log, start_new_session=True
        )

    try:
        until_healthy(process, url, (folder / "mlflow.log").read_text)
        yield url
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def runs(url: str, experiment: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(BIN / "python"), "-c", READ, url, experiment]
    found: list[dict[str, Any]] = json.loads(subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout)  # fmt: skip
    return found


def states(url: str) -> list[str]:
    """The states of all jobs, as their runs have them."""
    api = f"{url}/api/2.0/mlflow"
    try:
        found = httpx.post(f"{api}/experiments/search", json={"max_results": 10}, timeout=60).json()["experiments"]
        ids = [experiment["experiment_id"] for experiment in found]
        answer = httpx.post(f"{api}/runs/search", json={"experiment_ids": ids}, timeout=60).json()
    except httpx.TransportError:
        return []
    tags = [tag for run in answer.get("runs", []) for tag in run["data"]["tags"]]
    return [tag["value"] for tag in tags if tag["key"] == "rookery.state"]


def test_a_run_survives_the_ends_of_the_service_and_of_the_server(tmp_path: Path) -> None:
    port = free_port()
    allowed = {"reachable_hosts": f"127.0.0.1:{port}"}
    with mlflow(tmp_path, port) as url, served(tmp_path, **allowed) as service, client_of(service) as client:
        given = {"evaluation": {"prompts": 2}, "sinks": [{"url": url, "experiment": "sums"}]}
        id = submitted(client, **given)
        until(lambda: "queued" in states(url) or "running" in states(url))
        [begun] = runs(url, "sums")
        assert begun["status"] == "RUNNING" and begun["tags"]["rookery.job"] == id and not begun["series"]
    with served(tmp_path, **allowed) as service, client_of(service) as client, ThreadedWorker.of(service):
        _, done = end_of(client, id)
        assert done["state"] == "completed"
        until(lambda: [line for line in sink_events(client, id) if "Connection refused" in line])
        with mlflow(tmp_path, port):
            until(lambda: "completed" in states(url))
            [run] = runs(url, "sums")
        rows = client.get(f"/api/v1/jobs/{id}/metrics").json()
        evaluations = client.get(f"/api/v1/jobs/{id}/evaluations").json()
    assert run["name"] == "sums" and run["params"]["policies.main.rank"] == "4"
    assert sorted(run["series"]["reward"]) == [[row["step"], row["reward"]] for row in rows]
    assert sorted(run["series"]["evaluation/mean"]) == [[one["version"], one["mean"]] for one in evaluations]
    assert run["tags"]["rookery.state"] == "completed" and run["tags"]["rookery.step"] == "2"


async def test_names_batches_and_repeated_batches_are_taken_by_the_server(tmp_path: Path) -> None:
    names = ["größe", "a//b", "../c", "/d/", ".", "x" * 300, "50%", "tab\there", "reward/exact", "a:b c"]
    rows = [
        {"step": step, "time": 1e9 + step, "policy": "solver", "timing": {f"part{n}": 1.5 for n in range(400)},
         **dict.fromkeys(names, float(step)), "huge": 1e308}
        for step in range(6)
    ]  # fmt: skip
    spec = {"environment": {"id": "jsonl"}, "policies": {f"p{n}": {"targets": ["q"], "text": "ü" * 600, "empty": ""}
                                                         for n in range(80)}}  # fmt: skip
    port = free_port()
    settings = Settings.load({}, data=tmp_path / "data", reachable_hosts="127.0.0.1")
    with mlflow(tmp_path, port) as url:
        ask = partial(in_thread, Endpoint(SinkSpec(url=url), "sinks.0", settings).ask)
        for again in (-1, 5):
            run = MlflowRun(ask, "sinks.0.url", "many", "job-1")
            assert await run.open("many", 1e9, spec) == again
            for batch, last in batches(rows):
                await run.write(batch, last)
            await run.set_state("paused", "", None)
            await run.set_state("cancelled", "cancelled by its owner", 1e9 + 9)
        [found] = runs(url, "many")
    assert found["status"] == "KILLED" and len(found["params"]) > 200
    assert found["series"]["solver/reward/exact"] == [[step, float(step)] for step in range(6)]
    assert found["metrics"] == 400 + len(names) + 1
