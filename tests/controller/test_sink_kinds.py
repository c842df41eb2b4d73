"""Sinks of trackio and Weights & Biases with a secret of the tenant: what they get, over restarts; secrets."""

from __future__ import annotations

import base64
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from html import escape
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from tests.controller.test_job_sinks import client_of, sink_events, submitted
from tests.server.test_api import end_of
from tests.support.faces import ThreadedWorker, served
from tests.support.sink_stubs import SinkStub, TrackioStub, WandbStub, serving
from tests.support.waiting import until

from rookery.controller.job_sinks import ANSWER_BYTES, HEADERS, Endpoint
from rookery.controller.sink_run import NAME_LENGTH, Ask, Figure, RefusedBySink
from rookery.controller.trackio_run import TrackioRun
from rookery.controller.wandb_run import WandbRun
from rookery.errors import UserError
from rookery.settings import Settings
from rookery.spec.job import SinkSpec

KEY = "very-secret-0123456789"


def history(stub: WandbStub, job: str) -> list[dict[str, Any]] | None:
    """The lines of a run that has ended."""
    run = stub.runs.get(job)
    return [run["history"][number] for number in sorted(run["history"])] if run and "exitcode" in run else None


def everything(client: httpx.Client, job: str, root: Path) -> str:
    """All texts in which a secret could be: the job, its log, lists, metrics of the service, its logs on disk."""
    paths = (f"jobs/{job}", f"jobs/{job}/events", f"jobs/{job}/health", "jobs", "secrets", "runs", "usage")
    shown = [client.get(f"/api/v1/{path}").text for path in paths] + [client.get("/metrics").text]
    logs = [log.read_text() for log in (root / "data" / "logs").iterdir()]
    return "\n".join(shown + logs)


def run_with_a_dead_sink(
    root: Path, stub: SinkStub, sink: dict[str, Any], **rules: Any
) -> tuple[str, list[Any], list[Any]]:
    """A job that ends while its sink answers errors, then a service that is started again. Returns the job, its
    metrics and its evaluations."""
    allowed = {"reachable_hosts": stub.url.removeprefix("http://")}
    with served(root, **allowed, **rules) as service, client_of(service) as client, ThreadedWorker.of(service):
        assert client.put("/api/v1/secrets/mine", json={"value": KEY}).status_code == 200
        stub.broken = True
        sinks = [{"url": stub.url, "secret": "mine", "experiment": "sums", **sink}]
        job = submitted(client, evaluation={"prompts": 2}, sinks=sinks)
        _, done = end_of(client, job)
        assert done["state"] == "completed", "a dead sink changes nothing"
        [line] = until(lambda: sink_events(client, job))
        assert "sinks.0.url" in line and "500" in line and "goes on" in line
        assert KEY not in everything(client, job, root)
        assert base64.b64encode(f"api:{KEY}".encode()).decode() not in everything(client, job, root)
        rows = client.get(f"/api/v1/jobs/{job}/metrics").json()
        evaluations = client.get(f"/api/v1/jobs/{job}/evaluations").json()
    stub.broken = False
    return job, rows, evaluations


def endpoint(stub: SinkStub, kind: str, secret: str = KEY) -> Endpoint:
    spec = SinkSpec.model_validate({"kind": kind, "url": stub.url, "secret": "mine"})
    return Endpoint(spec, "sinks.0", Settings.load({"ROOKERY_REACHABLE_HOSTS": "127.0.0.1"}), secret)


def asking(stub: SinkStub) -> Ask:
    """Requests to a server without a connection."""

    async def ask(path: str, body: Any, read: Callable[[Any], Any] = lambda answer: answer) -> Any:
        return read(json.loads(json.dumps(stub.answer(f"/{path}", body))))

    return ask


def test_a_wandb_run_has_every_step_and_evaluation_once_over_restarts(tmp_path: Path) -> None:
    stub = WandbStub()
    with serving(stub):
        job, rows, evaluations = run_with_a_dead_sink(tmp_path, stub, {"kind": "wandb", "entity": "team"})
        for _ in range(2):  # the second one finds nothing to add
            stub.runs.get(job, {}).pop("exitcode", None)
            with served(tmp_path, reachable_hosts="127.0.0.1"):
                lines = until(lambda: history(stub, job))
    steps = [line for line in lines if "reward" in line]
    held_out = [line for line in lines if "evaluation/mean" in line]
    assert [(line["step"], line["reward"]) for line in steps] == [(row["step"], row["reward"]) for row in rows]
    assert {(line["step"], line["evaluation/mean"]) for line in held_out} == {
        (one["version"], one["mean"]) for one in evaluations
    }
    assert len(steps) + len(held_out) == len(lines) and len(held_out) == len(evaluations)
    assert [line["_step"] for line in lines] == list(range(len(lines)))
    run = stub.runs[job]
    assert run["exitcode"] == 0 and run["summary"]["rookery/state"] == "completed"
    assert run["config"]["policies.main.rank"] == {"value": "4"}
    assert any(path.startswith(f"/files/team/sums/{job}/") for path, _ in stub.seen)
    key = base64.b64encode(f"api:{KEY}".encode()).decode()
    assert {given["Authorization"] for given in stub.headers} == {f"Basic {key}"}


def test_a_trackio_run_has_every_step_once_and_rollouts_as_traces(tmp_path: Path) -> None:
    stub, few = TrackioStub(), {"sink_traces_read": 2}
    with serving(stub):
        _, rows, evaluations = run_with_a_dead_sink(tmp_path, stub, {"kind": "trackio", "traces": 3}, **few)
        for _ in range(2):
            stub.seen.clear()
            with served(tmp_path, reachable_hosts="127.0.0.1", **few):
                until(lambda: any(path == "/api/bulk_log" for path, _ in stub.seen))
                until(lambda: len(stub.rows) == len(rows) + len(evaluations))
    steps = {row["step"]: row["metrics"] for row in stub.rows.values() if "reward" in row["metrics"]}
    assert {step: values["reward"] for step, values in steps.items()} == {row["step"]: row["reward"] for row in rows}
    for values in steps.values():
        assert len(values["rollouts"]) == 3
        for trace in values["rollouts"]:
            assert trace["_type"] == "trackio.trace" and trace["metadata"]["reward"] is not None
            assert [message["role"] for message in trace["messages"]] == ["user", "assistant"]
    assert not stub.alerts and {row["run"] for row in stub.rows.values()} == {"sums"}
    assert {given["X-Trackio-Write-Token"] for given in stub.headers} == {KEY}


async def test_lines_whose_response_was_lost_are_not_written_twice() -> None:
    stub = WandbStub()

    ask = asking(stub)
    batch = [Figure("reward", 0.5, 1, 10.0), Figure("reward", 0.7, 2, 11.0)]
    evaluation = [Figure("evaluation/mean", 0.4, 1, 10.5)]
    for again in (-1, 2):
        run = WandbRun(ask, "sinks.0.url", "sums", None, "job-1")
        assert await run.open("sums", 9.0, {}) == again
        if again < 0:
            await run.write(batch, 2)
        await run.write(evaluation)
        await run.write(evaluation)
    stub.server_close()
    assert [line["_step"] for line in stub.runs["job-1"]["history"].values()] == [0, 1, 2]


def test_a_wandb_run_whose_job_waits_keeps_its_run_alive(tmp_path: Path) -> None:
    stub, rules = WandbStub(), {"reachable_hosts": "127.0.0.1", "sink_beat_seconds": 0.05}
    with serving(stub), served(tmp_path, **rules) as service, client_of(service) as client:
        submitted(client, sinks=[{"url": stub.url, "kind": "wandb"}])  # no worker: it waits
        until(lambda: [body for path, body in stub.seen if path.endswith("file_stream") and body == {}][2:])


@pytest.mark.parametrize("answer", [{"data": {}}, [], {"errors": [{"message": "no such team"}]}])
async def test_servers_of_another_kind_are_named(answer: Any) -> None:
    async def ask(path: str, body: Any, read: Callable[[Any], Any]) -> Any:
        return read(answer)

    with pytest.raises((UserError, RefusedBySink), match=r"sinks\.0\.url: answers in another form|no such team"):
        await WandbRun(ask, "sinks.0.url", "sums", None, "job-1").open("sums", 9.0, {})


@pytest.mark.parametrize(
    "bucket",
    [
        {"summaryMetrics": "[]"}, {"summaryMetrics": "[" * 100_000}, {"summaryMetrics": '{"_rookery": [1]}'},
        {"summaryMetrics": '{"_rookery": {"evaluations": [1]}}'}, {"historyLineCount": float("inf")},
        {"historyLineCount": 10**400}, {"summaryMetrics": f'{{"a": {10**400}}}'}, {"summaryMetrics": 3},
    ],
)  # fmt: skip
async def test_a_summary_of_another_form_is_named(bucket: Any) -> None:
    async def ask(path: str, body: Any, read: Callable[[Any], Any]) -> Any:
        return read({"data": {"model": {"bucket": bucket}}})

    with pytest.raises(UserError, match="answers in another form"):
        await WandbRun(ask, "sinks.0.url", "sums", None, "job-1").open("sums", 9.0, {})


async def test_a_run_keeps_no_more_of_a_summary_than_the_service_writes() -> None:
    stub = WandbStub()
    ask = asking(stub)
    run = WandbRun(ask, "sinks.0.url", "sums", None, "job-1")
    await run.open("sums", 9.0, {})
    await run.write([Figure("reward", 0.5, 1, 10.0)], 1)
    await run.write([Figure("evaluation/mean", 0.4, 1, 10.5)])
    summary = stub.runs["job-1"]["summary"]
    summary |= {"nested": {"a": 1}, "text": "x" * 1000, "x" * 251: 1.0, "_": None, "of another": 7.0}
    again = WandbRun(ask, "sinks.0.url", "sums", None, "job-1")
    assert await again.open("sums", 9.0, {}) == 1
    await again.write([Figure("evaluation/mean", 0.4, 1, 10.5)])
    await again.set_state("running", "", None)
    stub.server_close()
    kept = stub.runs["job-1"]["summary"]
    assert len(stub.runs["job-1"]["history"]) == 2 and kept["reward"] == 0.5 and kept["of another"] == 7.0
    assert not {"nested", "text", "x" * 251, "_"} & {*kept}


async def test_the_largest_summary_can_be_read_again() -> None:
    stub = WandbStub()
    run = WandbRun(asking(stub), "sinks.0.url", "sums", None, "job-1", most_evaluations=4)
    await run.open("sums", 9.0, {})
    name = "x" * (NAME_LENGTH - 4)
    await run.write([Figure(f"{name}{number:04}", -1.2345678901234567e-123, 1, 10.0) for number in range(1000)], 1)
    for step in range(9):
        await run.write([Figure("evaluation/mean", 0.4, step, 10.5)])
    await run.set_state("failed", "\N{GRINNING FACE}" * 600, 20.0)
    stub.server_close()
    summary = stub.runs["job-1"]["summary"]
    assert summary[f"{name}0000"] and len(summary["_rookery"]["evaluations"]) == 4
    summary["_rookery"]["evaluations"] = ["0" * 16] * 4000
    answer = {"data": {"model": {"bucket": {"summaryMetrics": json.dumps(summary), "historyLineCount": 10**9}}}}
    assert len(json.dumps(answer)) < ANSWER_BYTES


def test_an_answer_that_is_too_large_is_refused() -> None:
    class Large(WandbStub):
        def answer(self, path: str, body: Any) -> Any:
            return {"data": {"model": {"bucket": {"summaryMetrics": json.dumps({"a": "x" * ANSWER_BYTES})}}}}

    with serving(stub := Large()), pytest.raises(UserError, match=r"sinks\.0\.url: .* 200 with more than 2 MB"):
        endpoint(stub, "wandb").ask("graphql", {})


@pytest.mark.parametrize("secret", ["very-secret-0123456789", "ada:pass-word/0123456789", "ada:\"<&+\\'%/~"])
@pytest.mark.parametrize("kind", ["mlflow", "trackio", "wandb"])
def test_no_part_of_a_secret_is_in_an_error(secret: str, kind: str) -> None:
    """The server repeats the headers, the secret and the password in it, also where a line is cut."""
    password = secret.partition(":")[2] or secret
    texts = [secret, password, *(value.split()[-1] for value in HEADERS[kind](secret).values())]
    for one in [*texts]:
        texts += [json.dumps(one)[1:-1], repr(one)[1:-1], quote(one, safe=""), escape(one)]

    class Repeating(SinkStub):
        def answer(self, path: str, body: Any) -> Any:
            return {"errors": [{"message": body["text"]}]}

    def refuse(answer: Any) -> Any:
        raise RefusedBySink(answer["errors"][0]["message"])

    with serving(stub := Repeating()):
        asked = endpoint(stub, kind, secret)
        for length, text in product((0, 60, 66, 72, 78, 990), texts):
            with pytest.raises(UserError) as caught:
                asked.ask("graphql", {"text": "x" * length + text}, refuse)
            shown = str(caught.value).removeprefix("sinks.0.url: ").replace("x", "")
            assert shown.strip("….") == "", shown
        stub.broken = True
        for length in range(0, 90, 9):
            with pytest.raises(UserError) as caught:
                asked.ask("a" * length + quote(secret, safe=""), {})
            assert not any(text[:6] in str(caught.value) for text in texts), str(caught.value)


def test_a_request_holds_few_bytes_of_traces(tmp_path: Path) -> None:
    """Of each step that has too many, the first one is left."""
    stub, few = TrackioStub(), {"sink_trace_bytes": 1}
    with serving(stub):
        _, rows, evaluations = run_with_a_dead_sink(tmp_path, stub, {"kind": "trackio", "traces": 3}, **few)
        with served(tmp_path, reachable_hosts="127.0.0.1", **few):
            until(lambda: len(stub.rows) == len(rows) + len(evaluations))
    sent = [body["kwargs"]["logs"] for path, body in stub.seen if path == "/api/bulk_log"]
    traces = [[len(row["metrics"].get("rollouts", [])) for row in logs] for logs in sent]
    assert traces[: len(rows)] == [[1]] * len(rows), "a request for each step"


def test_a_secret_that_is_replaced_or_deleted_is_used_no_more(tmp_path: Path) -> None:
    stub = WandbStub()
    rules = {"reachable_hosts": "127.0.0.1", "sink_beat_seconds": 0.05, "sink_batch_seconds": 0.05}

    def key() -> str:
        return base64.b64decode(stub.headers[-1]["Authorization"].split()[1]).decode() if stub.headers else ""

    with serving(stub), served(tmp_path, **rules) as service, client_of(service) as client:
        for value in ("first", "second"):
            client.put("/api/v1/secrets/mine", json={"value": value})
            if value == "first":  # no worker: the job waits
                job = submitted(client, sinks=[{"url": stub.url, "kind": "wandb", "secret": "mine"}])
            until(lambda value=value: key() == f"api:{value}")
        client.delete("/api/v1/secrets/mine")
        until(lambda: [line for line in sink_events(client, job) if "sinks.0.secret: no secret 'mine'" in line])
        count = len(stub.headers)
        client.put("/api/v1/secrets/mine", json={"value": "third"})
        until(lambda: key() == "api:third")
        assert {given["Authorization"] for given in stub.headers[count:]} == {
            f"Basic {base64.b64encode(b'api:third').decode()}"
        }


def test_a_sink_above_the_most_waits_and_is_written_later(tmp_path: Path) -> None:
    first, second = TrackioStub(), TrackioStub()
    sinks = [{"url": stub.url, "kind": "trackio"} for stub in (first, second)]
    with (
        serving(first), serving(second),
        served(tmp_path, reachable_hosts="127.0.0.1", sink_of_tenant=1) as service, client_of(service) as client,
    ):  # fmt: skip
        with ThreadedWorker.of(service):
            job = submitted(client, sinks=sinks)
            _, done = end_of(client, job)
        assert done["state"] == "completed"
        until(lambda: len(first.rows) == len(second.rows) == 2)
        lines = sink_events(client, job)
    assert lines == ["sinks.1: waits: 1 other sink of yours is written; the metrics are sent later"]


def test_a_step_that_is_taken_again_is_sent_again(tmp_path: Path) -> None:
    stub, rules = WandbStub(), {"reachable_hosts": "127.0.0.1", "sink_batch_seconds": 0.05}
    with serving(stub), served(tmp_path, **rules) as service, client_of(service) as client:
        with ThreadedWorker.of(service):
            job = submitted(client, stop={"steps": 6}, sinks=[{"url": stub.url, "kind": "wandb"}])
            until(lambda: len(stub.runs.get(job, {"history": {}})["history"]) >= 2)
            assert client.post(f"/api/v1/jobs/{job}/pause").status_code == 200
            until(lambda: stub.runs[job]["summary"].get("rookery/state") == "paused")
            with closing(sqlite3.connect(next((tmp_path / "data").glob("*.db")))) as database:
                last, text = database.execute("SELECT step, metrics FROM steps ORDER BY step DESC LIMIT 1").fetchone()
                changed = json.dumps({**json.loads(text), "time": 1.5})  # as if taken again after a rollback
                database.execute("UPDATE steps SET metrics = ? WHERE step = ?", (changed, last))
                database.commit()
            assert client.post(f"/api/v1/jobs/{job}/resume").status_code == 200
            _, done = end_of(client, job)
        assert done["state"] == "completed"
        lines = until(lambda: history(stub, job))
    assert [line["step"] for line in lines] == [*range(1, last + 1), *range(last, 7)]
    assert [line["step"] for line in lines if line["_timestamp"] == 1.5] == [last]


async def test_each_pause_after_a_step_is_an_alert_once() -> None:
    stub = TrackioStub()
    for again in range(2):  # a restarted service writes the state again
        run = TrackioRun(asking(stub), "sinks.0.url", "sums", "job-1")
        await run.open("sums", 9.0, {})
        for step in (1, 2) if not again else (2,):
            await run.write([Figure("reward", 0.5, step, 10.0 + step)], step)
            for state in ("paused", "running"):
                await run.set_state(state, "by its owner", None)
    stub.server_close()
    assert [alert["title"] for alert in stub.alerts.values()] == ["job paused", "job paused"]


def test_secrets_are_set_listed_replaced_and_deleted_and_never_shown(tmp_path: Path) -> None:
    with served(tmp_path) as service, client_of(service) as client:
        for _ in range(2):
            answer = client.put("/api/v1/secrets/mine", json={"value": KEY})
            assert answer.status_code == 200 and KEY not in answer.text
        client.put("/api/v1/secrets/other.one", json={"value": "x"})
        found = client.get("/api/v1/secrets", params={"limit": 1})
        assert [row["name"] for row in found.json()] == ["mine"] and found.headers["X-Next-Page"]
        assert client.get("/api/v1/secrets/mine").status_code == 405
        for name, body in (
            ("a b", {"value": "x"}), ("-x", {"value": "x"}), ("x" * 101, {"value": "x"}), ("x", {"value": ""}),
            ("x", {"value": f"{KEY}\n"}), ("x", {"value": "ü"}), ("x", {"value": "a b"}), ("x", {"value": "x" * 4097}),
            ("x", {"value": "x", "more": 1}),
        ):  # fmt: skip
            answer = client.put(f"/api/v1/secrets/{name}", json=body)
            assert answer.status_code == 422 and KEY not in answer.text, answer.text
        for number in range(98):
            client.put(f"/api/v1/secrets/s{number}", json={"value": "x"})
        full = client.put("/api/v1/secrets/one-more", json={"value": "x"})
        assert full.status_code == 409 and "100 secrets" in full.json()["error"]
        assert client.put("/api/v1/secrets/mine", json={"value": "new"}).status_code == 200
        assert client.delete("/api/v1/secrets/mine").status_code == 204
        gone = client.delete("/api/v1/secrets/mine")
        assert gone.status_code == 404 and gone.json()["error"] == "no secret 'mine'; rookery secrets list shows yours"
