"""Unexpected exceptions in a service: the response, the log, and the connection afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from tests.support.faces import MODEL, ThreadedWorker, job, served, write_model
from tests.support.waiting import until

from rookery.controller.controller import Controller
from rookery.controller.feeds import JobFeeds
from rookery.controller.queries import JobQueries
from rookery.controller.sessions.sessions import Sessions
from rookery.server import auth
from rookery.server.launcher import EmbeddedService


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with served(tmp_path_factory.mktemp("errors")) as service:
        yield service


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 0


def fails(*arguments: Any, **more: Any) -> Any:
    raise ValueError("an internal secret")


def test_only_a_repetition_that_can_help_is_asked_for(tmp_path: Path) -> None:
    """The SDKs repeat requests that get 409 or 429 for minutes; Tinker's heeds the status alone."""
    with (
        served(tmp_path, tenant_metadata_bytes=1024) as service,
        httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as http,
    ):
        keys = f"/api/v1/tenants/{http.post('/api/v1/tenants', json={'name': 'ada'}).json()['id']}/keys"
        http.post(keys, json={}).raise_for_status()
        [key] = http.get(keys).json()
        assert http.delete(f"{keys}/{key['id']}").is_success
        refused = http.delete(f"{keys}/{key['id']}")
        assert refused.status_code == 409 and refused.headers["x-should-retry"] == "false"
        row = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
        file = http.post("/v1/files", files={"file": ("a.jsonl", row)}, data={"purpose": "fine-tune"}).json()["id"]
        create = {"sdk_version": "0.38.0", "user_metadata": {"note": "x" * 900}}
        while (full := http.post("/tinker/api/v1/create_session", json=create)).is_success:
            pass
        assert full.status_code == 400 and "of the database, allowed: 1024" in full.text
        tuning = {"model": MODEL, "training_file": file}
        for path, body in (("/api/v1/jobs", job()), ("/v1/fine_tuning/jobs", tuning)):
            refused = http.post(path, json=body)
            assert refused.status_code == 429 and "Retry-After" not in refused.headers, refused.text
            assert refused.headers["x-should-retry"] == "false"
        assert refused.json()["error"]["code"] == "insufficient_quota"


SMALL, LARGE = b'{"a": 1}', json.dumps({"a": "x" * 500_000}).encode()


@pytest.mark.parametrize(
    ("owner", "name", "broken", "method", "path", "body"),
    [
        (JobQueries, "list", fails, "GET", "/api/v1/jobs", b""),
        (JobQueries, "models", lambda self: [{"name": object()}], "GET", "/api/v1/models", b""),
        (JobQueries, "models", lambda self: [{"name": deep(300)}], "GET", "/api/v1/models", b""),
        (JobQueries, "health", fails, "GET", "/metrics", b""),
        (Controller, "submit", fails, "POST", "/api/v1/jobs", SMALL),
        (Controller, "submit", fails, "POST", "/api/v1/jobs", LARGE),
        (auth.FailedKeys, "check", fails, "POST", "/api/v1/jobs", LARGE),
        (auth.FailedKeys, "check", fails, "POST", "/api/v1/datasets", LARGE),
        (Sessions, "create", fails, "POST", "/tinker/api/v1/create_session", b'{"sdk_version": "1"}'),
        (auth.FailedKeys, "check", fails, "GET", "/v1/models", b""),
    ],
)
def test_an_unexpected_error_costs_no_later_request_of_its_connection(
    service: EmbeddedService, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Any, method: str,
    path: str, body: bytes,
) -> None:  # fmt: skip
    """A client that keeps its connection read the response with status 500 and lost its next request."""
    parts, headers = urlsplit(service.url), {"X-API-Key": service.key, "Content-Type": "application/json"}
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request("GET", "/healthz")
    connection.getresponse().read()
    kept = connection.sock
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, broken)
        for _ in range(3):
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            content = response.read()
            assert response.status == 500, content
            assert response.getheader("X-Content-Type-Options") == "nosniff"
            assert b"internal error" in content and b"secret" not in content
    connection.request(method, path, body or None, headers)
    assert connection.getresponse().read() is not None
    connection.request("GET", "/healthz")
    assert connection.getresponse().status == 200
    assert connection.sock is kept
    connection.close()

    def logged() -> bool:
        log = "".join(path.read_text() for path in (service.settings.data / "logs").iterdir())
        return f"{path.removeprefix('/tinker')} failed" in log and "Traceback" in log

    until(logged)  # another thread writes the log


def test_an_error_within_a_response_ends_its_connection(
    service: EmbeddedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else shows the client that the response is not whole."""

    async def follow(*arguments: Any) -> Any:
        yield "quiet", None
        raise ValueError("no more")

    monkeypatch.setattr(JobFeeds, "follow", follow)
    with httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as client:
        id = client.post("/api/v1/jobs", json=job()).json()["id"]
        with pytest.raises(httpx.RemoteProtocolError):
            client.get(f"/api/v1/jobs/{id}/metrics/stream")
        assert client.get("/healthz").status_code == 200
        client.post(f"/api/v1/jobs/{id}/cancel")
        client.delete(f"/api/v1/jobs/{id}")


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


VALUES = [
    (r'"cut \ud83d here"', r'x: given "cut \ud83d here", allowed: whole characters'),
    (r'{"\udc00": 1}', r'x: given the field "\udc00", allowed: whole characters'),
    ("1e400", "x: given 1e400, allowed: a number between"),
    ("1e-400", "x: given 1e-400, allowed: a number between"),
    ("18446744073709551616", "x: given 18446744073709551616, allowed: a whole number"),
    ("-9223372036854775809", "x: given -9223372036854775809, allowed: a whole number"),
    ('{"a": 1, "a": 2}', "x.a: given twice"),
    (nested(255), "nested more than 64 deep"),
    (nested(65), "nested more than 64 deep"),
]


@pytest.mark.parametrize(("value", "says"), VALUES, ids=[value[:20] for value, _ in VALUES])
def test_every_way_in_refuses_values_that_a_run_cannot_carry(service: EmbeddedService, value: str, says: str) -> None:
    """An upload, inline rows and options of a job, by one check; the line names the field."""
    row = f'{{"prompt": "a", "answer": "4", "x": {value}}}'
    jobs = []
    for environment in (f'"verifier": "exact", "rows": [{row}]', f'"x": {value}'):
        spec = job(environment={"id": "jsonl", "@": 0})
        jobs.append(json.dumps(spec).replace('"@": 0', environment).encode())
    with httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as client:
        response = client.post("/api/v1/datasets", content=f'{{"prompt": "a"}}\n{row}'.encode())
        error = response.json()["error"]
        assert response.status_code == 400 and error.startswith("dataset: line 2: ") and says in error
        for path in ("/api/v1/jobs", "/api/v1/jobs/dry-run"):
            for body in jobs:
                response = client.post(path, content=body, headers={"Content-Type": "application/json"})
                error = response.json()["error"]
                assert response.status_code == 422 and says in error, error
                assert "environment." in error or "deep" in says
        assert client.get("/api/v1/jobs").json() == []


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/api/v1/jobs/dry-run"])
def test_an_inline_row_keeps_its_digits_or_is_refused(service: EmbeddedService, path: str) -> None:
    spec = job(environment={"id": "jsonl", "verifier": "number", "rows": [{"prompt": "a", "answer": 4.25}]})
    body = json.dumps(spec).replace("4.25", "12345678.123456789012").encode()
    with httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as client:
        response = client.post(path, content=body, headers={"Content-Type": "application/json"})
        says = "environment.rows.0.answer: given 12345678.123456789012, which would become 12345678.12345679"
        assert response.status_code == 422 and says in response.json()["error"]


def test_an_inline_row_may_be_as_large_as_an_uploaded_one(service: EmbeddedService) -> None:
    rows = [{"prompt": "a", "answer": "4"}, {"prompt": "x" * (256 << 10), "answer": "4"}]
    spec = job(environment={"id": "jsonl", "verifier": "exact", "rows": rows})
    with httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as client:
        response = client.post("/api/v1/jobs/dry-run", json=spec)
        assert response.status_code == 422 and "environment.rows.1: 2621" in response.text, response.text
        assert "ROOKERY_ROW_BYTES" in response.text
        for odd in (5, "abc", {"a": 1}, None):
            environment = {"id": "jsonl", "verifier": "exact", "rows": odd}
            assert client.post("/api/v1/jobs", json=job(environment=environment)).status_code == 422


def test_a_row_that_is_taken_is_shown_by_every_result(service: EmbeddedService) -> None:
    """The deepest nesting, control characters, and numbers at the ends of their ranges; on one connection."""
    deepest: Any = 1
    for _ in range(61):
        deepest = [deepest]
    numbers = [2**64 - 1, -(2**63), 1e308, 5e-324]
    odd = {"prompt": "\x00 \x85\u2028\ufeff", "answer": "4", "k\x00": deepest, "n": numbers}
    rows = [json.dumps({**odd, "prompt": prompt}).encode() for prompt in (odd["prompt"], "b")]
    with (
        ThreadedWorker.of(service),
        httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as client,
    ):
        train, held_out = (client.post("/api/v1/datasets", content=row).json()["dataset"] for row in rows)
        environment = {"id": "jsonl", "verifier": "exact", "dataset": train, "eval_dataset": held_out}
        id = client.post("/api/v1/jobs", json=job(environment=environment, evaluation={"prompts": 1})).json()["id"]
        show = lambda: client.get(f"/api/v1/jobs/{id}").json()  # noqa: E731
        until(lambda: show()["state"] not in ("queued", "running"))
        view = show()
        assert view["state"] == "completed", view
        shown = client.get(f"/api/v1/jobs/{id}/trajectories").json()
        evaluations = client.get(f"/api/v1/jobs/{id}/evaluations").json()
    assert all(episode["prompt"] == odd for episode in shown) and shown
    assert evaluations[0]["held_out"][0]["prompt"] == {**odd, "prompt": "b"}


def test_rows_whose_roles_the_chat_template_refuses_are_named_at_submission(tmp_path: Path) -> None:
    """As the template of a model refuses them that has no system message, or none of a tool."""
    settings = write_model(tmp_path / "cache") / "tokenizer_config.json"
    template = (
        "{% for m in messages %}{% if m.role in ('system', 'tool') %}{{ raise_exception('no ' + m.role) }}{% endif %}"
        "{{ m.content }}\n{% endfor %}"
    )
    settings.write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "b"}
    tool = {"role": "tool", "content": "c"}
    rows = [{"prompt": "a"}, {"messages": [user, user]}, {"prompt": [user, tool]}, {"messages": [system, user]}]
    environment = {"id": "jsonl", "verifier": {"name": "regex", "pattern": "4"}, "rows": rows}
    with (
        served(tmp_path) as service,
        httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as client,
    ):
        response = client.post("/api/v1/jobs", json=job(environment=environment))
        assert response.status_code == 422 and response.json()["problems"] == [
            "environment: dataset: row 3: qwen3-0.6b: the chat template refuses messages with roles [user, tool]:"
            " no tool; give messages that it takes",
            "environment: dataset: row 4: qwen3-0.6b: the chat template refuses messages with roles [system, user]:"
            " no system; give messages that it takes",
        ]
        good = {**environment, "rows": rows[:2]}
        assert client.post("/api/v1/jobs", json=job(environment=good)).status_code == 201


def test_rows_that_the_chat_template_of_a_judge_refuses_are_named_at_submission(tmp_path: Path) -> None:
    """It reads them, too. One that never replies does not."""
    other, cache = "smollm2-135m-instruct", tmp_path / "cache"
    write_model(cache)
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
    )
    settings = write_model(cache, other) / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
    messages = [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]
    judges = {"id": "jsonl", "rows": [{"messages": messages}], "verifier": {"name": "judge", "policy": "judge"}}
    base = {"train": False, "base": True}
    with (
        served(tmp_path) as service,
        httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as client,
    ):
        policies = {"main": {}, "judge": {**base, "base_model": other}}
        response = client.post("/api/v1/jobs", json=job(environment=judges, policies=policies))
        assert response.status_code == 422 and response.json()["problems"] == [
            f"environment: dataset: row 1: {other}: the chat template refuses messages with roles [system, user]:"
            " no system; give messages that it takes"
        ]
        policies = {"main": {}, "judge": base, "silent": {**base, "base_model": other}}
        assert client.post("/api/v1/jobs", json=job(environment=judges, policies=policies)).status_code == 201
