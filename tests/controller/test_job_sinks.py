"""Sinks of jobs, against a small MLflow stub: what is sent, restarts, servers that are away, addresses, keys."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update
from tests.server.test_api import end_of
from tests.support.faces import ThreadedWorker, job, served
from tests.support.waiting import until

from rookery.controller.job_sinks import parse_sinks
from rookery.controller.sink_run import METRICS_AT_ONCE, batches, metric_name, params
from rookery.errors import UserError
from rookery.storage.data_dir import DATABASE_FILE
from rookery.storage.db import Database
from rookery.storage.models import JobRow


class Stub(ThreadingHTTPServer):
    """Keeps runs as MLflow does, as far as the service uses them. While ``broken`` it answers 500
    and repeats the credentials; while ``answers`` is not set, it does not answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.experiments: list[str] = []
        self.runs: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.broken, self.answers = False, threading.Event()
        self.answers.set()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "experiments/search":
            found = [name for name in self.experiments if body["filter"] == f"name = '{name}'"]
            return {"experiments": [{"experiment_id": str(self.experiments.index(name))} for name in found]}
        if path == "experiments/create":
            self.experiments.append(body["name"])
            return {"experiment_id": str(len(self.experiments) - 1)}
        if path == "runs/search":
            wanted = re.fullmatch(r"tags.`rookery.job` = '(.+)'", body["filter"])
            assert wanted is not None
            return {"runs": [_shown(run) for run in self.runs if run["tags"]["rookery.job"] == wanted[1]]}
        if path == "runs/create":
            tags = {tag["key"]: tag["value"] for tag in body["tags"]}
            run = {"id": f"r{len(self.runs)}", "name": body["run_name"], "tags": tags, "metrics": set(), "params": {}}
            self.runs.append(run)
            return {"run": _shown(run)}
        run = next(run for run in self.runs if run["id"] == body["run_id"])
        if path == "runs/update":
            run["status"] = body["status"]
        else:
            run["metrics"] |= {(one["key"], one["step"], one["value"], one["timestamp"])
                               for one in body.get("metrics", [])}  # fmt: skip
            run["params"] |= {one["key"]: one["value"] for one in body.get("params", [])}
            run["tags"] |= {one["key"]: one["value"] for one in body.get("tags", [])}
        return {}

    def run_of(self, job: str) -> dict[str, Any] | None:
        """The run of a job that has ended."""
        found = [run for run in self.runs if run["tags"]["rookery.job"] == job]
        assert len(found) <= 1
        return found[0] if found and found[0].get("status") == "FINISHED" else None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that no longer waits is no fault."""


def _shown(run: dict[str, Any]) -> dict[str, Any]:
    return {"info": {"run_id": run["id"]}, "data": {"tags": [{"key": k, "value": v} for k, v in run["tags"].items()]}}


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.keys.add(self.headers["Authorization"])
        self.server.answers.wait()
        if self.server.broken:
            self.reply(500, f"broken: {self.headers['Authorization']}".encode())
        else:
            path = self.path.removeprefix("/api/2.0/mlflow/")
            self.reply(200, json.dumps(self.server.answer(path, json.loads(body))).encode())

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    server = Stub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, stub: Stub) -> Iterator[httpx.Client]:
    """Of a service that reaches the stub, and no other private address."""
    allowed = stub.url.removeprefix("http://")
    root = tmp_path_factory.mktemp("sinks")
    with (
        served(root, reachable_hosts=allowed) as service,
        ThreadedWorker.of(service),
        client_of(service) as opened,
    ):
        yield opened


def client_of(service: Any) -> httpx.Client:
    return httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {service.key}"}, timeout=60)


def submitted(client: httpx.Client, **more: Any) -> str:
    answer = client.post("/api/v1/jobs", json=job(**more))
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def sink_events(client: httpx.Client, id: str) -> list[str]:
    return [one["text"] for one in client.get(f"/api/v1/jobs/{id}/events").json() if one["kind"] == "sink"]


def test_a_job_is_a_run_with_metrics_evaluations_params_and_its_end(client: httpx.Client, stub: Stub) -> None:
    id = submitted(client, evaluation={"prompts": 2}, sinks=[{"url": stub.url, "experiment": "sums of ada"}])
    _, done = end_of(client, id)
    assert done["state"] == "completed"
    run = until(lambda: stub.run_of(id))
    rows = client.get(f"/api/v1/jobs/{id}/metrics").json()
    evaluations = client.get(f"/api/v1/jobs/{id}/evaluations").json()
    assert sink_events(client, id) == [] and evaluations
    assert stub.experiments == ["sums of ada"] and run["name"] == "sums"
    found = {(key, step): value for key, step, value, _ in run["metrics"]}
    for row in rows:
        assert found["reward", row["step"]] == row["reward"]
    assert {step for key, step in found if key == "reward"} == {1, 2}
    assert [found["evaluation/mean", one["version"]] for one in evaluations] == [one["mean"] for one in evaluations]
    assert run["params"]["policies.main.rank"] == "4" and run["params"]["environment"] == "jsonl"
    assert run["tags"]["rookery.state"] == "completed" and run["tags"]["rookery.step"] == "2"
    assert stub.keys == {None}


def test_figures_of_several_policies_are_at_the_steps_of_the_job(client: httpx.Client, stub: Stub) -> None:
    policies = {"solver": {"rank": 4, "targets": ["q"]}, "rater": {"rank": 4, "targets": ["q"]}}
    environment = {**job()["environment"], "verifier": {"name": "judge", "policy": "rater"}}
    id = submitted(
        client, policies=policies, environment=environment, evaluation={"prompts": 2, "every": 1},
        sinks=[{"url": stub.url}],
    )  # fmt: skip
    assert end_of(client, id)[1]["state"] == "completed"
    run = until(lambda: stub.run_of(id))
    steps = {(name, 0): 0 for name in policies}
    for row in client.get(f"/api/v1/jobs/{id}/metrics").json():
        steps[row["policy"], row["version"]] = row["step"]
    found = {(key, step): value for key, step, value, _ in run["metrics"] if key.endswith("evaluation/mean")}
    evaluations = client.get(f"/api/v1/jobs/{id}/evaluations").json()
    assert len(evaluations) == 6 and found == {
        (f"{one['policy']}/evaluation/mean", steps[one["policy"], one["version"]]): one["mean"] for one in evaluations
    }


def test_a_sink_that_does_not_answer_delays_no_job(client: httpx.Client, stub: Stub) -> None:
    stub.answers.clear()
    try:
        id = submitted(client, sinks=[{"url": stub.url}, {"url": stub.url, "experiment": "another"}])
        _, done = end_of(client, id)
        assert done["state"] == "completed" and not [r for r in stub.runs if r["tags"]["rookery.job"] == id]
    finally:
        stub.answers.set()


def test_a_dead_sink_changes_nothing_and_a_restarted_service_continues_the_run(tmp_path: Path, stub: Stub) -> None:
    """The key of a named server is in no event, job, log or error, although the server repeats it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SINK_KEY", "very-secret")
        named = f"team={stub.url} SINK_KEY"
        stub.broken = True
        with served(tmp_path, sinks=named) as service, client_of(service) as client, ThreadedWorker.of(service):
            id = submitted(client, sinks=[{"server": "team"}])
            _, done = end_of(client, id)
            assert done["state"] == "completed" and done["step"] == 2
            [line] = until(lambda: sink_events(client, id))
            assert "sinks.0.server" in line and "500" in line and "goes on" in line and "very-secret" not in line
            assert "very-secret" not in client.get(f"/api/v1/jobs/{id}").text
            figures = client.get("/metrics").text
            assert float(re.findall(r"^rookery_sink_failures_total (\S+)", figures, re.MULTILINE)[0]) >= 1
        assert stub.run_of(id) is None and "Bearer very-secret" in stub.keys
        stub.broken = False
        with closing(Database(f"sqlite:///{tmp_path}/data/{DATABASE_FILE}")) as database, database.writing() as rows:
            rows.execute(update(JobRow).values(finished=JobRow.finished - 86400.0))  # it is stopped for a day
        with served(tmp_path, sinks=named):
            run = until(lambda: stub.run_of(id))
        assert sorted(step for key, step, *_ in run["metrics"] if key == "reward") == [1, 2]
        for log in (tmp_path / "data" / "logs").iterdir():
            assert "very-secret" not in log.read_text()


@pytest.mark.parametrize(
    ("sink", "says"),
    [
        ({"url": "http://127.0.0.1:1"}, "ROOKERY_REACHABLE_HOSTS"),
        ({"url": "http://169.254.169.254"}, "not an address of the public internet"),
        ({"url": "http://[::1]:5000"}, "not an address of the public internet"),
        ({"url": "http://ada:very-secret@example.com"}, "allowed: an address"),
        ({"url": "http://example.com/?token=very-secret"}, "allowed: an address"),
        ({"url": "file:///etc/passwd"}, "allowed: an address"),
        ({"server": "team"}, "ROOKERY_SINKS"),
        ({}, "exactly one of"),
        ({"url": "http://example.com", "server": "team"}, "exactly one of"),
        ({"url": "http://example.com", "experiment": "it's"}, "experiment"),
        ({"url": "http://example.com", "kind": "neptune"}, "'mlflow', 'trackio' or 'wandb'"),
        (
            {"url": "http://93.184.215.14", "secret": "mine"},
            "sent to 93.184.215.14 in clear; give an address with https://",
        ),
        ({"url": "https://example.com", "secret": "mine"}, "no secret 'mine'; give it with rookery secrets set mine"),
        ({"server": "team", "secret": "mine"}, "secret belongs to url"),
        ({"url": "http://example.com", "entity": "ada"}, "entity belongs to the kind wandb"),
        ({"url": "http://example.com", "traces": 2}, "traces belongs to the kind trackio"),
        ({"url": "http://example.com", "kind": "wandb", "experiment": "a/b"}, "no /"),
        ({"url": "http://example.com", "kind": "trackio", "experiment": "a/b"}, "no /"),
    ],
)
def test_sinks_that_cannot_be_used_are_refused_in_a_line(client: httpx.Client, sink: Any, says: str) -> None:
    answer = client.post("/api/v1/jobs", json=job(sinks=[sink]))
    line = answer.json()["error"]
    assert answer.status_code == 422 and "sinks.0" in line and says in line, answer.text
    assert "ada:very-secret" not in line


@pytest.mark.parametrize("text", ["team", "=http://a", "team=a", "team=http://a B C", "team=http://u:p@a"])
def test_a_wrong_setting_is_refused_with_the_allowed_values(text: str) -> None:
    with pytest.raises(UserError, match="ROOKERY_SINKS"):
        parse_sinks(text)


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("reward/exact", "reward/exact"),
        ("reward/größe%", "reward/gr__e_-HASH"),
        ("/a//b/", "a/b-HASH"),
        ("../..", "_/_-HASH"),
        ("", "-HASH"),
        ("x" * 300, "x" * 241 + "-HASH"),
        ("x" * 250, "x" * 250),
        ("solver/loss", "solver/loss"),
    ],
)
def test_metric_names_are_ones_that_mlflow_takes(name: str, sent: str) -> None:
    found = metric_name(name)
    assert re.sub("-[0-9a-f]{8}$", "-HASH", found) == sent and len(found) <= 250 and found == metric_name(name)


def test_no_two_metrics_have_one_series() -> None:
    names = ["reward/正确率", "reward/准确率", "reward/a%", "reward/a$", "reward/a_", "/a/b", "a/b", "a//b", "a/./b",
             "a/_/b", "x" * 250, "x" * 251, "x" * 252]  # fmt: skip
    [(sent, _)] = batches([{"step": 1, "time": 0.0, **dict.fromkeys(names, 0.5)}])
    assert len({one.key for one in sent}) == len(names)


def test_batches_hold_whole_steps_of_every_policy() -> None:
    rows = [
        {"step": step, "time": float(step), "policy": "ab"[step % 2], "reward": 0.5, "bad": float("nan"),
         "timing": {f"part{n}": 1.0 for n in range(300)}}
        for step in range(10)
    ]  # fmt: skip
    found = list(batches(rows))
    assert [last for _, last in found] == [2, 5, 8, 9] and all(len(batch) <= METRICS_AT_ONCE for batch, _ in found)
    sent = {(one.key, one.step) for batch, _ in found for one in batch}
    assert {("a/reward", 0), ("b/reward", 1), ("b/timing/part7", 9)} <= sent and ("a/bad", 0) not in sent
    assert list(batches([])) == []


def test_options_of_an_environment_are_no_params() -> None:
    spec = {"environment": {"id": "openenv", "headers": {"key": "secret"}}, "stop": {"steps": 2, "reward": None}}
    assert params(spec) == {"environment": "openenv", "stop.steps": "2"}
