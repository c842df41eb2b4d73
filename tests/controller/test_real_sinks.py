"""Sinks of jobs and the real packages: trackio's server, the client of Weights & Biases, TensorBoard's reader."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.controller.test_job_sinks import client_of, sink_events, submitted
from tests.controller.test_mlflow import BIN
from tests.server.test_api import end_of
from tests.support.faces import ThreadedWorker, served
from tests.support.ports import free_port
from tests.support.sink_stubs import WandbStub, serving
from tests.support.waiting import until, until_healthy

from rookery.client import Client
from rookery.client.tensorboard import FILE_VERSION, event

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not (BIN / "trackio").exists(), reason="trackio is not here: make test-sinks"),
]

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""Of the packages' interpreters."""

TRACKIO = "import trackio; trackio.show(open_browser=False, block_thread=True)"

READ_TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage as storage
project, name, run = sys.argv[1:]
print(json.dumps({"rows": storage.get_logs(project, name, run_id=run), "alerts": storage.get_alerts(project),
                  "config": storage.get_run_config(project, name, run_id=run),
                  "traces": storage.get_traces(project, name, run_id=run)}, default=str))
"""

LOG_WANDB = """
import json, sys, wandb
rows, evaluations = json.load(sys.stdin)
run = wandb.init(project="sums", entity="team", id="by-hand", name="sums", config={"seed": 0},
                 settings=wandb.Settings(x_disable_stats=True, x_disable_meta=True, console="off"))
run.define_metric("step")
run.define_metric("*", step_metric="step")
for row in rows + evaluations:
    run.log(row)
run.finish()
"""

READ_TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1]).Reload()
print(json.dumps({tag: [[one.step, one.value] for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}))
"""


def python(script: str, *arguments: str, given: str = "", **variables: str) -> Any:
    """The output of a script in the packages' environment."""
    done = subprocess.run(
        [str(BIN / "python"), "-c", script, *arguments], env=ENVIRONMENT | variables, input=given, check=True,
        text=True, stdout=subprocess.PIPE,
    )  # fmt: skip
    return json.loads(done.stdout) if done.stdout.startswith("{") else done.stdout


@contextmanager
def trackio(folder: Path, port: int) -> Iterator[str]:
    """A server; it is killed at the end, and the next one in the folder continues."""
    environment = ENVIRONMENT | {
        "TRACKIO_DIR": str(folder / "trackio"), "TRACKIO_WRITE_TOKEN": "write-token", "GRADIO_SERVER_PORT": str(port),
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    with (folder / "trackio.log").open("ab") as log:
        process = subprocess.Popen(
            [str(BIN / "python"), "-c", TRACKIO], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until_healthy(process, url, (folder / "trackio.log").read_text, path="/")
        yield url
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def test_a_trackio_run_survives_the_ends_of_the_service_and_of_the_server(tmp_path: Path) -> None:
    port = free_port()
    allowed = {"reachable_hosts": f"127.0.0.1:{port}"}

    def stored(id: str) -> Any:
        return python(READ_TRACKIO, "sums", "sums", id, TRACKIO_DIR=str(tmp_path / "trackio"))

    with trackio(tmp_path, port) as url, served(tmp_path, **allowed) as service, client_of(service) as client:
        client.put("/api/v1/secrets/board", json={"value": "write-token"})
        client.put("/api/v1/secrets/wrong", json={"value": "mistyped"})
        sink = {"kind": "trackio", "url": url, "experiment": "sums", "traces": 2}
        sinks = [{**sink, "secret": "board"}, {**sink, "secret": "wrong"}]
        id = submitted(client, evaluation={"prompts": 2}, sinks=sinks)
    with served(tmp_path, **allowed) as service, client_of(service) as client, ThreadedWorker.of(service):
        _, done = end_of(client, id)
        assert done["state"] == "completed"
        until(lambda: [line for line in sink_events(client, id) if "Connection refused" in line])
        with trackio(tmp_path, port):
            rows = client.get(f"/api/v1/jobs/{id}/metrics").json()
            evaluations = client.get(f"/api/v1/jobs/{id}/evaluations").json()
            whole = len(rows) + len(evaluations)
            until(lambda: len(stored(id)["rows"]) >= whole)
            until(lambda: [line for line in sink_events(client, id) if "write_token is required" in line])
    found = stored(id)
    assert len(found["rows"]) == whole
    steps = {row["step"]: row["reward"] for row in found["rows"] if "reward" in row}
    assert steps == {row["step"]: row["reward"] for row in rows}
    assert [trace["step"] for trace in sorted(found["traces"], key=lambda one: one["step"])] == [1, 1, 2, 2]
    assert all(trace["messages"][-1]["role"] == "assistant" for trace in found["traces"])
    assert found["config"]["policies.main.rank"] == "4" and not found["alerts"]


def test_the_run_is_the_one_that_the_client_of_weights_and_biases_makes(tmp_path: Path) -> None:
    """The same server takes both; history, axis and end are alike, and so are the fields of each request."""
    stub = WandbStub()
    with serving(stub):
        with served(tmp_path, reachable_hosts="127.0.0.1") as service, client_of(service) as client:
            client.put("/api/v1/secrets/mine", json={"value": "a" * 40})
            sink = {"kind": "wandb", "url": stub.url, "secret": "mine", "entity": "team", "experiment": "sums"}
            with ThreadedWorker.of(service):
                id = submitted(client, evaluation={"prompts": 2}, sinks=[sink])
                end_of(client, id)
            until(lambda: "exitcode" in stub.runs.get(id, {}))
        ours, sent, headers = stub.runs[id], list(stub.seen), stub.headers[0]
        stub.seen.clear()
        lines = [{k: v for k, v in line.items() if not k.startswith("_")} for line in ours["history"].values()]
        python(
            LOG_WANDB, given=json.dumps([lines, []]), WANDB_API_KEY="a" * 40, WANDB_BASE_URL=stub.url,
            WANDB_DIR=str(tmp_path), WANDB_ERROR_REPORTING="false", WANDB_SILENT="true",
        )  # fmt: skip
    theirs = stub.runs["by-hand"]
    assert headers["Authorization"] == stub.headers[-1]["Authorization"]
    for number, line in theirs["history"].items():
        mine = ours["history"][number]
        assert {k: v for k, v in line.items() if k not in ("_timestamp", "_runtime")} == {
            k: v for k, v in mine.items() if k not in ("_timestamp", "_runtime")
        }
        assert {type(line[key]) for key in ("_timestamp", "_runtime")} == {float} == {type(mine["_timestamp"])}
    assert len(theirs["history"]) == len(ours["history"])
    assert ours["exitcode"] == theirs["exitcode"] == 0
    assert ours["config"]["_wandb"]["value"]["m"] == theirs["config"]["_wandb"]["value"]["m"]
    for name in ("upsertBucket", "RunResumeStatus"):
        mine, real = (next(body for path, body in seen if path == "/graphql" and name in body["query"])
                      for seen in (sent, [*stub.seen, *sent]))  # fmt: skip
        assert set(mine["variables"]) <= set(real["variables"])
    paths = {path.replace(id, "by-hand") for path, _ in sent}
    assert paths <= {path for path, _ in stub.seen}


def test_tensorboard_reads_the_events_of_a_job(tmp_path: Path) -> None:
    with served(tmp_path) as service, client_of(service) as client, ThreadedWorker.of(service):
        id = submitted(client, evaluation={"prompts": 2})
        with Client(service.url, service.key) as opened:
            job = opened.job(id)
            job.write_tensorboard(tmp_path / "board", follow=True)
            job.wait()
            for _ in range(2):  # a second time replaces the first
                file = job.write_tensorboard(tmp_path / "board")
        rows = client.get(f"/api/v1/jobs/{id}/metrics").json()
        evaluations = client.get(f"/api/v1/jobs/{id}/evaluations").json()
    found = python(READ_TENSORBOARD, str(file.parent))
    assert found["reward"] == [[row["step"], pytest.approx(row["reward"], rel=1e-6)] for row in rows]
    assert found["evaluation/mean"] == [[one["version"], pytest.approx(one["mean"], rel=1e-6)] for one in evaluations]


def test_tensorboard_forgets_the_steps_before_a_rollback(tmp_path: Path) -> None:
    taken = [event(float(step), step, {"reward": float(step)}) for step in (1, 2, 3, 4)]
    again = [event(10.0, 3, restart=True), event(11.0, 3, {"reward": 30.0})]
    (tmp_path / "events.out.tfevents.1.job").write_bytes(b"".join([event(1.0, version=FILE_VERSION), *taken, *again]))
    assert python(READ_TENSORBOARD, str(tmp_path)) == {"reward": [[1, 1.0], [2, 2.0], [3, 30.0]]}
