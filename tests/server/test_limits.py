"""Limits on what one client can make the service hold: bodies, connections, messages before the hello, wrong keys."""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import io
import json
import math
import pkgutil
import random
import re
import select
import shutil
import socket
import tarfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvicorn
from fastapi import APIRouter
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from tests.support.faces import MODEL, ThreadedWorker, adapter_files, job, served
from tests.support.peers import eventually, settle
from tests.support.waiting import until
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.server import ServerState
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from rookery import protocol
from rookery.bounds import CHUNKS, CONVERSATION, PROMPTS
from rookery.client import Client
from rookery.clock import SystemClock
from rookery.controller.service_time import BURST, REFUSED_WAITING, KeylessTime, RequestAccount, ServiceTime
from rookery.errors import TooManyRequests, Unauthorized
from rookery.protocol.envhost import MOST_EPISODES
from rookery.server import routes
from rookery.server.auth import Caller, FailedKeys, Keys
from rookery.server.bodies import (
    BODY_RATE,
    INLINE_BYTES,
    SENT_BYTES,
    BodyInvalid,
    BodyRefused,
    BoundedRequest,
    TimeKeeper,
    parse,
    parts_of,
)
from rookery.server.connections import (
    BYTE_SECONDS,
    CONNECTION_SECONDS,
    EDGE_RULES,
    QUEUED,
    BoundedHttp,
    BoundedWebSocket,
    Connections,
    Slot,
)
from rookery.server.launcher import EmbeddedService
from rookery.server.openai_responses import ResponsesRequest
from rookery.server.response_room import RESPONSE_BYTES, ResponseRoom
from rookery.server.tinker import calls as tinker_calls
from rookery.server.tinker import sessions as tinker_sessions
from rookery.server.tinker.schemas import ModelInput
from rookery.simulation.clock import VirtualClock, run
from rookery.storage.db import Database
from rookery.storage.models import KeyRow
from rookery.storage.repositories import jobs
from rookery.turns import SPENT

JSON = {"Content-Type": "application/json"}

ROUTE_MODULES = [f"{routes.__name__}.{found.name}" for found in pkgutil.iter_modules(routes.__path__)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("limits")


@pytest.fixture(scope="module")
def service(root: Path) -> Iterator[EmbeddedService]:
    with served(root) as service, ThreadedWorker.of(service):
        yield service


@pytest.fixture(scope="module")
def tenant(service: EmbeddedService) -> Iterator[httpx.Client]:
    with admin_of(service) as admin:
        id = admin.post("/api/v1/tenants", json={"name": "ada"}).json()["id"]
        key = admin.post(f"/api/v1/tenants/{id}/keys", json={"label": "test"}).json()["key"]
        with httpx.Client(base_url=service.url, headers={"X-API-Key": key}, timeout=60) as client:
            until(lambda: tenant_models(client) == "loaded")
            yield client


def token_of(service: EmbeddedService) -> str:
    return (service.settings.data / "worker.token").read_text().strip()


def admin_of(service: EmbeddedService) -> httpx.Client:
    return httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60)


def tenant_models(client: httpx.Client) -> str:
    return next(row["state"] for row in client.get("/api/v1/models").json() if row["name"] == MODEL)


def metric(service: EmbeddedService, name: str) -> float:
    with httpx.Client(verify=False, timeout=60) as http:  # no certificates are read, which takes 24 ms
        text = http.get(f"{service.url}/metrics").text
    found = re.search(rf"^rookery_{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


LONGEST_WAIT = 15.0
"""Seconds in which ``/healthz`` answers also where the machine is busy with others. A loop that waits, as for a lock,
a child or the database, computes nothing meanwhile."""


@contextmanager
def loop_rounds(service: EmbeddedService) -> Iterator[list[float]]:
    """Processor time of the service's event loop from each round to the next during the block, without other threads:
    for so long nobody else is served, however busy the machine is with others."""
    rounds: list[float] = []

    async def sample() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0.001)
            rounds.append(time.thread_time() - began)

    sampling = service.call(sample())
    try:
        yield rounds
    finally:
        sampling.cancel()


@contextmanager
def pauses(service: EmbeddedService) -> Iterator[list[float]]:
    """How long another client waits for ``/healthz`` during the block: each time, in seconds that this process computes
    meanwhile, which is the service's too. A machine that is busy with others changes little. Fails where an answer
    takes more than :data:`LONGEST_WAIT`, or does not come."""
    waited, answered, stop, watching = [], [], threading.Event(), threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=service.url, timeout=60) as client:
            while not stop.is_set():
                computed, began = time.process_time(), time.monotonic()
                try:
                    status = client.get("/healthz").status_code
                except httpx.HTTPError as error:
                    status = repr(error)
                waited.append(time.process_time() - computed)
                answered.append((time.monotonic() - began, status))
                watching.set()
                time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    watching.wait()
    try:
        yield waited
    finally:
        stop.set()
        thread.join()
    assert all(seconds < LONGEST_WAIT and status == 200 for seconds, status in answered), max(answered)


# --- bodies -----------------------------------------------------------------------------------------------------------


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text('ab"\\[]{},é', max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text('a"\\[,', max_size=4), inner, max_size=5),
    max_leaves=20,
)


def size_of(value: Any) -> tuple[int, int]:
    """Commas and brackets of a value's JSON, and its depth, counted on the value."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [size_of(item) for item in (value.values() if isinstance(value, dict) else value)]
    return max(1, len(inner)) + sum(items for items, _ in inner), 1 + max((depth for _, depth in inner), default=0)


def paths_of(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The path of each field in a value, and the JSON of the value with that field twice."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (
                f"{path}.{json.dumps(key)[1:-1]}".removeprefix("."),
                f"{json.dumps(value)[:-1]}, {json.dumps(key)}: 0}}",
            )
            for found, text in paths_of(inner, f"{path}.{json.dumps(key)[1:-1]}"):
                rest = {name: one for name, one in value.items() if name != key}
                before = json.dumps(rest)[:-1] + (", " if rest else "")
                yield found, f"{before}{json.dumps(key)}: {text}}}"
    if isinstance(value, list):
        for number, inner in enumerate(value):
            for found, text in paths_of(inner, f"{path}.{number}"):
                parts = [json.dumps(one) for one in value]
                yield found, f"[{', '.join([*parts[:number], text, *parts[number + 1 :]])}]"


@given(VALUES)
def test_a_field_that_is_given_twice_is_named_wherever_it_is(value: Any) -> None:
    for path, text in paths_of(value):
        if "" in path.split("."):
            continue
        with pytest.raises(BodyRefused) as refused:
            parse(text.encode(), 10_000, 64)
        assert refused.value.detail == f"{path}: given twice; keep one of them"


@pytest.mark.parametrize(
    ("path", "status", "body", "field"),
    [
        ("/v1/chat/completions", 400, '"messages": [], "model": "a", "model": "b"', "model"),
        ("/v1/completions", 400, '"model": "a", "stream_options": {"x": 1, "x": 2}', "stream_options.x"),
        ("/v1/responses", 400, '"input": "a", "input": "b"', "input"),
        ("/v1/fine_tuning/jobs", 400, '"model": "a", "seed": 1, "seed": 2', "seed"),
        ("/tinker/api/v1/create_session", 400, '"tags": [], "tags": ["a"]', "tags"),
        ("/tinker/api/v1/asample", 400, '"num_samples": 1, "num_samples": 2', "num_samples"),
        ("/tinker/oai/api/v1/completions", 400, '"model": "a", "model": "b"', "model"),
        ("/api/v1/sample", 422, '"prompt": "a", "prompt": "b"', "prompt"),
        ("/api/v1/jobs", 422, '"name": "a", "name": "b"', "name"),
        ("/api/v1/tenants", 422, '"name": "a", "name": "b"', "name"),
    ],
)
def test_every_door_refuses_a_body_with_a_field_twice(
    service: EmbeddedService, path: str, status: int, body: str, field: str
) -> None:
    with httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as client:
        for padding in ("", f', "padding": "{"x" * INLINE_BYTES}"'):  # and parsed in a thread
            headers = {"Content-Type": "application/json"}
            response = client.post(path, content=f"{{{body}{padding}}}".encode(), headers=headers)
            assert response.status_code == status, response.text
            assert f"{field}: given twice; keep one of them" in response.text


@pytest.mark.parametrize(
    ("address", "status", "name"),
    [
        ("/api/v1/jobs?limit=1&limit=2", 422, "limit"),
        ("/api/v1/runs?text=a&text=b", 422, "text"),
        ("/v1/files?limit=1&limit=2", 400, "limit"),
        ("/api/v1/runs?state=running&state=failed&id=a&id=b", 200, ""),
    ],
)
def test_a_parameter_that_is_given_twice_is_named(
    service: EmbeddedService, address: str, status: int, name: str
) -> None:
    with httpx.Client(base_url=service.url, headers={"X-API-Key": service.key}, timeout=60) as client:
        response = client.get(address)
        assert response.status_code == status, response.text
        assert not name or f"{name}: given twice; keep one of them" in response.text


@given(VALUES)
def test_items_and_depth_are_counted_outside_of_texts(value: Any) -> None:
    body, (items, depth) = json.dumps(value).encode(), size_of(value)
    assert parse(body, max(1, items), depth) == value
    if items > 1:
        with pytest.raises(BodyRefused, match=rf"more than {items - 1} items?;"):
            parse(body, items - 1, depth)
    if depth:
        with pytest.raises(BodyRefused, match="deep"):
            parse(body, max(1, items), depth - 1)


@pytest.mark.parametrize(
    ("body", "setting"),
    [
        (b"{" + b",".join(b'"key%07d":1' % i for i in range(1_000_000)) + b"}", "ROOKERY_JSON_BYTES"),
        (b"[" + b"1," * 250_000 + b"1]", "more than 200000 items"),
    ],
    ids=["keys", "items"],
)
def test_million_keys_are_refused_while_others_are_answered(
    service: EmbeddedService, tenant: httpx.Client, body: bytes, setting: str
) -> None:
    """Such a body used to stop the event loop for 20 seconds."""
    refused = metric(service, "bodies_refused_total")
    with pauses(service) as waited:
        response = tenant.post("/api/v1/jobs/dry-run", content=body, headers=JSON)
    assert response.status_code == 413 and setting in response.text
    assert max(waited) < 2 and metric(service, "bodies_refused_total") == refused + 1


def test_many_mistakes_below_the_limit_are_counted_not_listed(service: EmbeddedService, tenant: httpx.Client) -> None:
    body = b"{" + b",".join(b'"key%05d":1' % i for i in range(80_000)) + b"}"
    with pauses(service) as waited:
        response = tenant.post("/api/v1/jobs/dry-run", content=body, headers=JSON)
    assert response.status_code == 422 and len(response.content) < 1000, response.text[:500]
    assert max(waited) < 2


MESSAGE = {"role": "user", "content": "a"}
MESSAGES = [MESSAGE]

MUCH = {
    "schema": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "n": 32, "response_format": {
            "type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "x": [{}] * 8000}},
        }},
    ),
    "prompts": ("/v1/completions", {"prompt": ["a"] * 1024, "stop": ["s" * 20] * 16, "max_tokens": 2}),
    "biases": ("/v1/completions", {
        "prompt": ["a"] * 512, "stream": True, "max_tokens": 2, "logit_bias": {str(token): 1 for token in range(250)},
    }),
    "echo": ("/v1/completions", {"prompt": ["a" * 200] * 500, "echo": True, "max_tokens": 0}),
    "token ids": ("/v1/completions", {"prompt": ["a" * 400] * 8, "n": 100, "return_token_ids": True, "max_tokens": 1}),
    "top_logprobs": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 100},
    ),
    "samples": ("/tinker/api/v1/asample", {
        "num_samples": 1024, "seq_id": 1, "sampling_params": {"max_tokens": 2},
        "prompt": {"chunks": [{"tokens": [1], "type": "encoded_text"}]},
    }),
}  # fmt: skip
"""Requests whose work grows with more than their bytes: paths and bodies."""


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedService, httpx.Client, str]]:
    """A service with longer replies, its administrator, and a sampler of Tinker's protocol."""
    root = tmp_path_factory.mktemp("sampled")
    with served(root) as service, ThreadedWorker.of(service, ("4" * 100, "five" * 25)), admin_of(service) as admin:
        until(lambda: tenant_models(admin) == "loaded")
        session = admin.post("/tinker/api/v1/create_session", json={}).json()["session_id"]
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
        sampler = admin.post("/tinker/api/v1/create_sampling_session", json=asked).json()["sampling_session_id"]
        admin.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES}).raise_for_status()
        gc.collect()
        gc.freeze()  # as the service does where it is its program
        yield service, admin, sampler
        gc.unfreeze()


@pytest.mark.parametrize("shape", MUCH)
def test_the_event_loop_divides_the_work_of_a_request(
    sampled: tuple[EmbeddedService, httpx.Client, str], shape: str
) -> None:
    """Each but the samples held the event loop for 0.3 to 4 seconds in one piece."""
    service, admin, sampler = sampled
    path, body = MUCH[shape]
    sampling = shape == "samples"
    target = {"sampling_session_id": sampler} if sampling else {"model": MODEL}
    with loop_rounds(service) as rounds:
        answer = admin.post(path, json={**target, **body})
        assert answer.status_code == 200, answer.text
        if sampling:
            wanted = {"request_id": answer.json()["request_id"]}
            while b"try_again" in (answer := admin.post("/tinker/api/v1/retrieve_future", json=wanted)).content:
                pass
            assert answer.headers["content-type"] == "application/x-protobuf", answer.text
    assert max(rounds) < 0.15, sorted(rounds)[-5:]


PART = {"type": "text", "text": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": ""}}


def test_a_prompt_may_have_a_chunk_for_each_token() -> None:
    """As ``ModelInput.append_int`` of Tinker's SDK makes them."""
    assert len(ModelInput.model_validate({"chunks": [{"tokens": [1]}] * CHUNKS}).chunks) == CHUNKS
    with pytest.raises(ValidationError, match="too_long"):
        ModelInput.model_validate({"chunks": [{"tokens": [1]}] * (CHUNKS + 1)})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": MODEL, "messages": [MESSAGE] * (CONVERSATION + 1)}),
        ("/v1/responses", {"model": MODEL, "input": [MESSAGE] * (CONVERSATION + 1)}),
        ("/api/v1/sample", {"target": MODEL, "messages": [MESSAGE] * (CONVERSATION + 1)}),
        ("/v1/completions", {"model": MODEL, "prompt": ["a"] * (PROMPTS + 1)}),
        ("/v1/completions", {"model": MODEL, "prompt": [[1]] * (PROMPTS + 1)}),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{**MESSAGE, "content": [PART] * 820}] * 5}),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{**MESSAGE, "tool_calls": [CALL] * 100}] * 41}),
        ("/v1/responses", {"model": MODEL, "input": [{**MESSAGE, "content": [PART] * 820}] * 5}),
        ("/v1/responses", {"model": MODEL, "input": [{"type": "function_call_output", "output": [PART] * 820}] * 5}),
    ],
)
def test_parts_of_a_request_are_counted_before_they_are_checked(
    tenant: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    refused = tenant.post(path, json=body)
    assert refused.status_code in (400, 422) and re.search("at most (2048|1024|4096)", refused.text), refused.text


def test_parts_of_reasoning_are_not_counted() -> None:
    items = [{"type": "reasoning", "content": [PART] * 5000}, {**MESSAGE, "content": [PART] * 1000}]
    assert ResponsesRequest.model_validate({"model": MODEL, "input": items}).input[0].content is None


LARGE = "a" * INLINE_BYTES


@pytest.mark.parametrize("padding", ["a", LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/chat/completions", {"messages": [MESSAGE], "n": 0}, 400, "n: Input should be greater than or equal to 1"),
        ("/v1/chat/completions", {"messages": [MESSAGE, {"role": "x"}]}, 400, "messages.1.role: Input should be"),
        ("/v1/chat/completions", {"messages": [MESSAGE], "model": "no"}, 404, "no job and no base model"),
        ("/v1/responses", {"input": [MESSAGE, {"role": "x"}]}, 400, "input.1.role: Input should be"),
        ("/v1/responses", {"input": [MESSAGE, {"type": "function_call"}]}, 400, "input.1.name: a call names its func"),
        ("/api/v1/sample", {"messages": [MESSAGE], "target": MODEL, "n": 0, "model": 1}, 422, "unknown field"),
    ],
)
def test_large_bodies_are_validated_as_small_ones_are(
    tenant: httpx.Client, path: str, body: dict[str, Any], status: int, message: str, padding: str
) -> None:
    texts = body.get("messages", body.get("input", []))
    padded = {"model": MODEL, **body, "input" if "input" in body else "messages": [{**MESSAGE, "content": padding}]}
    padded["input" if "input" in body else "messages"] += texts[1:]
    response = tenant.post(path, json=padded)
    assert response.status_code == status and message in response.text, response.text[:500]


async def test_a_large_body_is_validated_where_it_is_parsed() -> None:
    """FastAPI takes the object as it is."""
    validated: list[int] = []

    async def threads(work: Any) -> Any:
        return await asyncio.to_thread(work)

    def validate(value: Any, *, loc: tuple[str, ...]) -> tuple[Any, list[Any]]:
        validated.append(threading.get_ident())
        return (value, []) if value else (None, [{"loc": loc}])

    context = SimpleNamespace(threads=threads, refusals=Counter[str]())
    scope = {"type": "http", "path": "/", "headers": [], "method": "POST", "query_string": b"", "server": ("a", 1)}
    scope["app"] = SimpleNamespace(state=SimpleNamespace(context=context))
    for padding, calls in (("a", 0), (LARGE, 1)):

        async def receive(body: bytes = json.dumps([padding]).encode()) -> Any:
            return {"type": "http.request", "body": body}

        assert await BoundedRequest(scope, receive, validate).json() == [padding]
        assert len(validated) == calls and threading.get_ident() not in validated

    async def empty() -> Any:
        return {"type": "http.request", "body": b" " * INLINE_BYTES + b"[]"}

    with pytest.raises(BodyInvalid) as refused:
        await BoundedRequest(scope, empty, validate).json()
    assert refused.value.error.errors() == [{"loc": ("body",)}]


def test_wrong_token_ids_are_refused_while_others_are_answered(service: EmbeddedService, tenant: httpx.Client) -> None:
    """One error for each, of every type that a prompt may have, used to stop the event loop for 5 seconds."""
    with pauses(service) as waited:
        response = tenant.post("/v1/completions", json={"model": MODEL, "prompt": [-1] * 190_000})
    assert response.status_code == 400 and "prompt.0: Input should be greater" in response.text, response.text[:500]
    assert max(waited) < 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/api/v1/sample"])
def test_huge_prompt_is_refused_while_others_are_answered(
    service: EmbeddedService, tenant: httpx.Client, path: str
) -> None:
    """Such a prompt used to stop the event loop for 8 to 10 seconds."""
    for size, status in ((14 << 20, 413), (1 << 19, 400)):
        body: dict[str, Any] = {"model": MODEL, "prompt": "word " * (size // 5)}
        if path != "/v1/completions":
            body = {"model": MODEL, "messages": [{"role": "user", "content": body["prompt"]}]}
        if path == "/api/v1/sample":
            body["target"] = body.pop("model")
        with pauses(service) as waited:
            response = tenant.post(path, json=body)
        assert response.status_code == status, response.text
        assert max(waited) < 2
    assert "characters" in response.text
    if path != "/api/v1/sample":
        assert response.json()["error"]["code"] == "context_length_exceeded"


def test_arguments_of_a_long_conversation_are_not_read(tenant: httpx.Client) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": f"[{'{},' * 300_000}{{}}]"}}
    said = [{"role": "assistant", "tool_calls": [call]}, MESSAGE]
    refused = tenant.post("/v1/chat/completions", json={"model": MODEL, "messages": said})
    assert refused.json()["error"]["code"] == "context_length_exceeded", refused.text


def test_bodies_of_one_tenant_in_memory_are_bounded(tmp_path: Path) -> None:
    """One request may have all; a second beside it is refused until the first has ended. Other tenants go on."""
    with served(tmp_path, tenant_body_bytes=1 << 20) as service, admin_of(service) as admin:
        id = admin.post("/api/v1/tenants", json={"name": "ada"}).json()["id"]
        ada = {"X-API-Key": admin.post(f"/api/v1/tenants/{id}/keys", json={}).json()["key"]}
        go = threading.Event()

        def slowly() -> Iterator[bytes]:
            yield b"x" * ((1 << 20) + 2 * io.DEFAULT_BUFFER_SIZE)
            go.wait()
            yield b"x" * (1 << 20)

        def post(body: Any, **headers: str) -> httpx.Response:
            return httpx.post(f"{service.url}/api/v1/adapters", content=body, headers=headers, timeout=60)

        def written() -> bool:
            """Whether the service has read the whole limit; a request before that may have the slow one refused. The
            file lacks what its writer still buffers."""
            return any(path.stat().st_size >= 1 << 20 for path in (tmp_path / "data" / "artifacts").rglob("*"))

        with ThreadPoolExecutor(1) as pool, ExitStack() as opened:
            opened.callback(go.set)
            slow = pool.submit(post, slowly(), **ada)
            until(written)
            answer = post(b"x" * 1000, **ada)
            assert answer.status_code == 429
            assert "ROOKERY_TENANT_BODY_BYTES" in answer.text and answer.headers["Retry-After"] == "1"
            assert post(b"x" * 1000, **{"X-API-Key": service.key}).status_code == 400
            go.set()
            assert slow.result().status_code == 400, "it is no archive"
        assert post(b"x" * 1000, **ada).status_code == 400


DEEP = b'{"a":' * 70 + b"1" + b"}" * 70
BROKEN = b'{"temperature": NaN}'


@pytest.mark.parametrize("body", [DEEP, b"[" * 100_000, BROKEN, b'"\xff"', b'{"a": "\\ud83d"}', b"1e999"], ids=len)
@pytest.mark.parametrize(
    "path", ["/api/v1/jobs", "/api/v1/sample", "/v1/chat/completions", "/v1/completions", "/tinker/api/v1/asample"]
)
def test_odd_json_is_refused(tenant: httpx.Client, path: str, body: bytes) -> None:
    response = tenant.post(path, content=body, headers=JSON)
    assert response.status_code in (400, 413, 422), response.text


@pytest.mark.parametrize("odd", [{"stop": ["\ud83d"]}, {"temperature": 1e-40}], ids=str)
def test_odd_sampling_is_refused(tenant: httpx.Client, odd: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"model": MODEL, "messages": messages, **odd},
        "/v1/completions": {"model": MODEL, "prompt": "Hi", **odd},
        "/api/v1/sample": {"target": MODEL, "messages": messages, **odd},
        "/api/v1/jobs/dry-run": job(sampling=odd),
        "/tinker/api/v1/asample": {
            "prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": odd, "sampling_session_id": "s", "seq_id": 1,
        },
    }  # fmt: skip
    for path, body in bodies.items():
        response = tenant.post(path, content=json.dumps(body), headers=JSON)
        assert response.status_code in (400, 422) and "no tenant" not in response.text, (path, response.text)
        assert re.search("temperature|half of one", response.text), (path, response.text)


def test_deeply_nested_pattern_is_refused(tenant: httpx.Client) -> None:
    rows = [{"prompt": "?", "answer": "1"}]
    verifier = {"name": "regex", "pattern": "(" * 5000 + ")" * 5000}
    environment = {"id": "jsonl", "rows": rows, "verifier": verifier}
    response = tenant.post("/api/v1/jobs/dry-run", json=job(environment=environment))
    assert response.status_code == 422 and "pattern" in response.text, response.text


def test_deeply_nested_adapter_config_is_refused(tenant: httpx.Client) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in {**adapter_files(1.0), "adapter_config.json": b"[" * 200_000}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    response = tenant.post("/api/v1/adapters", content=content.getvalue())
    assert response.status_code == 400 and "adapter_config.json" in response.text


@pytest.mark.parametrize(
    "body",
    [b"]" * (16 << 20), b"[" + b",".join([b"1" * 4000] * 4000) + b"]", b"[" * (1 << 20)],
    ids=["]", "digits", "["],
)
def test_json_that_costs_more_than_its_bytes_is_refused_before_it_is_parsed(body: bytes) -> None:
    began = time.thread_time()
    with pytest.raises(BodyRefused, match=r"items|digits|deep"):
        parse(body, 200_000, 64)
    assert time.thread_time() - began < 1


@pytest.mark.parametrize("text", ["1" * 100, "-" + "9" * 100, "0." + "1" * 100, "1e100"])
def test_long_numbers_are_parsed_up_to_their_limit(text: str) -> None:
    """Digits within a text do not count."""
    assert parse(f'[{text}, "{"1" * 5000}"]'.encode(), 100, 8)[1] == "1" * 5000


TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "base_model": ("/api/v1/jobs/dry-run", job(base_model="x" * 15_000_000)),
    "hosted": ("/api/v1/jobs", job(environment={"hosted": "x" * 12_000_000})),
    "stop": ("/api/v1/jobs", job(sampling={"stop": ["x" * 12_000_000]})),
    "unknown field": ("/api/v1/jobs", job(**{"x" * 12_000_000: 1})),
    "environment": ("/api/v1/jobs", job(environment={"id": "x" * 12_000_000})),
    "policy": ("/api/v1/jobs", job(policies={"x" * 12_000_000: {}})),
    "loss": ("/api/v1/jobs", job(algorithm={"loss": {"name": "aipo", "x" * 12_000_000: 1}})),
    "user_metadata": ("/tinker/api/v1/create_session", {"user_metadata": {"x": "x" * 15_000_000}}),
    "sdk_version": ("/tinker/api/v1/create_session", {"sdk_version": "x" * 15_000_000}),
    "chat model": ("/v1/chat/completions", {"model": "x" * 900_000, "messages": [{"role": "user", "content": "Hi"}]}),
    "ignored": ("/v1/chat/completions", {"model": MODEL, "metadata": "x" * 900_000, "messages": []}),
}


@pytest.mark.parametrize("field", TEXTS)
def test_long_text_of_a_name_is_refused_in_one_short_line(
    service: EmbeddedService, tenant: httpx.Client, field: str
) -> None:
    path, body = TEXTS[field]
    with pauses(service) as waited:
        response = tenant.post(path, json=body)
    assert 400 <= response.status_code < 500, response.text[:200]
    assert len(response.content) < 20_000 and max(waited) < 1, sorted(waited)[-3:]


@pytest.mark.parametrize("path", ["/api/v1/jobs/", "/api/v1/tenants/", "/v1/models/", "/nowhere/"])
def test_long_path_is_refused_in_one_short_line(path: str, tenant: httpx.Client) -> None:
    """Errors that name an object repeat its name."""
    refused = tenant.get(path + "x" * 5000)
    assert refused.status_code == 414 and len(refused.content) < 300, refused.text[:300]


def test_metadata_with_line_ends_is_one_line_of_the_log(service: EmbeddedService, tenant: httpx.Client) -> None:
    forged = "0.38\n12:00:00 error: the database is lost\x1b[2K"
    tenant.post("/tinker/api/v1/create_session", json={"sdk_version": forged}).raise_for_status()

    def written() -> list[str]:
        lines = (service.settings.data / "logs" / "service.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line)["message"] for line in lines if "the database is lost" in line and line.endswith("\n")]

    said = until(written)
    assert len(said) == 1 and said[0].isprintable()


HEAD = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"

# --- connections ------------------------------------------------------------------------------------------------------


def test_half_open_connections_make_no_one_wait(tmp_path: Path) -> None:
    """More connections that never finish a request's head than the service allows: clients are answered, also from the
    same address, and a worker stays connected."""
    with served(tmp_path, connections=40) as service, ExitStack() as opened:
        client = opened.enter_context(admin_of(service))
        opened.enter_context(ThreadedWorker.of(service))
        until(lambda: tenant_models(client) == "loaded")
        url = httpx.URL(service.url)
        for _ in range(300):
            half = opened.enter_context(socket.create_connection((url.host, url.port or 80), timeout=10))
            half.sendall(HEAD)
        for _ in range(3):
            assert httpx.get(f"{service.url}/healthz", timeout=60).status_code == 200
        assert tenant_models(client) == "loaded"
        assert metric(service, "connections") <= 40 and metric(service, "connections_evicted_total") >= 250
        assert client.get("/api/v1/health").json()["totals"]["worker_losses"] == 0


def test_connection_without_a_request_is_closed(tmp_path: Path) -> None:
    with served(tmp_path, head_seconds=1.0) as service:
        url = httpx.URL(service.url)
        for sent, then in ((b"", b""), (HEAD, b""), (HEAD + b"\r\n", b"\r\n"), (HEAD + b"\r\n", HEAD)):
            with socket.create_connection((url.host, url.port or 80), timeout=10) as half:
                half.sendall(sent)
                if then:
                    assert half.recv(1 << 16).startswith(b"HTTP/1.1 200")
                    half.sendall(then)
                with suppress(ConnectionResetError):
                    while half.recv(1 << 16):
                        pass


def test_connections_of_workers_and_hosts_outlast_the_time_for_a_head(tmp_path: Path) -> None:
    with (
        served(tmp_path, head_seconds=1.0) as service,
        admin_of(service) as client,
        ThreadedWorker.of(service),
    ):
        until(lambda: tenant_models(client) == "loaded" and metric(service, "environment_hosts") > 0)
        url = httpx.URL(service.url)
        with socket.create_connection((url.host, url.port or 80), timeout=60) as later, suppress(ConnectionResetError):
            assert later.recv(1) == b"", "a connection that was opened after theirs has used up its time"
        log = (service.settings.data / "logs" / "service.jsonl").read_text()
        assert client.get("/api/v1/health").json()["totals"]["worker_losses"] == 0 and " left" not in log


@pytest.mark.parametrize("path", ["/wire/worker", "/wire/host"])
def test_messages_before_the_hello_are_small(service: EmbeddedService, path: str) -> None:
    headers = {"Authorization": f"Bearer {token_of(service)}"}
    with connect(service.url.replace("http", "ws", 1) + path, additional_headers=headers) as peer:
        peer.send(bytes((1 << 20) + 1))
        with pytest.raises(ConnectionClosed) as closed:
            peer.recv(timeout=60)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


def test_sockets_without_a_hello_are_bounded(tmp_path: Path) -> None:
    with served(tmp_path, hello_sockets=4) as service, ExitStack() as opened:
        url = service.url.replace("http", "ws", 1) + "/wire/worker"
        for _ in range(20):
            opened.enter_context(connect(url, additional_headers={"Authorization": f"Bearer {token_of(service)}"}))
        # One more when the service's environment host says hello among them.
        assert metric(service, "connections") <= 8 and metric(service, "connections_evicted_total") in (16, 17)
        client = opened.enter_context(admin_of(service))
        opened.enter_context(ThreadedWorker.of(service))
        until(lambda: tenant_models(client) == "loaded")


def test_head_without_end_is_not_kept(service: EmbeddedService) -> None:
    url, before = httpx.URL(service.url), metric(service, "connections_flooding_total")
    with socket.create_connection((url.host, url.port or 80), timeout=10) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nX: ")
        sent = 0
        with suppress(OSError):
            while sent < 64 << 20:
                sent += stranger.send(b"x" * (1 << 16))
    assert sent < 16 << 20  # with the buffers of both ends
    assert metric(service, "connections_flooding_total") == before + 1


def test_flood_of_requests_on_a_connection_delays_no_other_client(service: EmbeddedService) -> None:
    """Without waiting for responses, as no client does. A read of the socket has thousands of them."""
    url, before = httpx.URL(service.url), metric(service, "connections_flooding_total")
    with pauses(service) as waited, ExitStack() as opened:
        for _ in range(4):
            stranger = opened.enter_context(socket.create_connection((url.host, url.port or 80), timeout=10))
            with suppress(OSError):
                stranger.sendall((HEAD + b"\r\n") * 30_000)
    assert max(waited) < 1, sorted(waited)[-5:]
    until(lambda: metric(service, "connections_flooding_total") == before + 4)


def test_small_heads_after_a_large_body_are_no_flood(tenant: httpx.Client) -> None:
    """On one connection."""
    rows = b'{"prompt": "2+2?", "answer": "4"}\n' * 10_000
    for _ in range(2):
        tenant.post("/api/v1/datasets", content=rows).raise_for_status()
        tenant.get("/api/v1/health", headers={"X-Long": "x" * 30_000}).raise_for_status()


def test_bodies_that_never_come_leave_places_for_others(tmp_path: Path) -> None:
    """A tenant holds at most half of what an address may open."""
    with served(tmp_path, connections=80, body_seconds=600.0) as service, ExitStack() as opened:
        greedy, other = keys_of(service, "greedy", "other")
        url = httpx.URL(service.url)
        head = f"POST /api/v1/jobs/dry-run HTTP/1.1\r\nHost: x\r\nX-API-Key: {greedy}\r\nContent-Length: 9\r\n\r\n"
        slow = [
            opened.enter_context(socket.create_connection((url.host, url.port or 80), timeout=30)) for _ in range(39)
        ]
        for one in slow:
            one.sendall(head.encode())
        for _ in range(5):
            answer = httpx.get(f"{service.url}/api/v1/jobs", headers={"X-API-Key": other}, timeout=LONGEST_WAIT)
            assert answer.status_code == 200
        refused = until(lambda: len(found := select.select(slow, [], [], 0)[0]) >= 19 and found)
        assert {one.recv(1 << 16)[9:12] for one in refused} == {b"429"}
        assert metric(service, "requests_open_total") == len(refused) and metric(service, "bodies_slow_total") == 0
        for one in slow:
            one.close()
        until(lambda: httpx.get(f"{service.url}/api/v1/jobs", headers={"X-API-Key": greedy}, timeout=60).is_success)


def service_seconds(service: EmbeddedService, name: str) -> float:
    with admin_of(service) as admin:
        return float(next(row["service_seconds"] for row in admin.get("/api/v1/tenants").json() if row["name"] == name))


def service_parts(service: EmbeddedService, name: str) -> dict[str, float]:
    """The service's seconds for a tenant by kind of work."""
    with admin_of(service) as admin:
        found = next(row for row in admin.get("/api/v1/tenants").json() if row["name"] == name)
        assert found["service_seconds"] == pytest.approx(sum(found["service_parts"].values()))
        return dict(found["service_parts"])


def test_service_time_of_jobs_and_checks_is_counted_for_their_tenant(tmp_path: Path) -> None:
    with served(tmp_path) as service, ThreadedWorker.of(service):
        ada, _ = keys_of(service, "ada", "bob")
        assert Client(service.url, ada).submit(job()).wait(timeout=120).state == "completed"
        found = service_parts(service, "ada")
        assert all(found[kind] > 0 for kind in ("requests", "checks", "jobs")) and found["hosts"] == 0, found
        assert set(service_parts(service, "bob").values()) == {0.0}


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: apt-get install bubblewrap")
def test_service_time_of_graders_is_counted_for_their_tenant(service: EmbeddedService, tenant: httpx.Client) -> None:
    source = "def grade(sample, item):\n    return float(sum(range(20_000_000)) > 0)\n"
    grader = {"type": "python", "name": "long", "source": source}
    before = service_parts(service, "ada")["checks"]
    tried = {"grader": grader, "model_sample": "x", "item": {}}
    assert tenant.post("/v1/fine_tuning/alpha/graders/run", json=tried).json()["reward"] == 1
    assert service_parts(service, "ada")["checks"] - before > 0.05, "a sum of twenty million numbers"


def test_reads_of_a_refused_body_are_charged_to_its_tenant(service: EmbeddedService, tenant: httpx.Client) -> None:
    """The service reads what follows a refusal, so that the client reads its response."""
    rest, before = 200_000_000, service_seconds(service, "ada")
    with socket.create_connection((tenant.base_url.host, tenant.base_url.port), timeout=60) as peer:
        head = f"POST /api/v1/jobs HTTP/1.1\r\nHost: x\r\nX-API-Key: {tenant.headers['X-API-Key']}\r\n"
        peer.sendall(f"{head}Content-Length: {rest}\r\n\r\n".encode())
        for _ in range(rest // 1_000_000):
            peer.sendall(b" " * 1_000_000)
        assert b" 413 " in peer.recv(1000).split(b"\r\n")[0]
        until(lambda: service_seconds(service, "ada") - before >= rest * BYTE_SECONDS)


def test_new_connections_are_charged_to_the_tenant_of_their_first_request() -> None:
    slot, charged = Slot(cast(Any, None), "::1"), list[float]()
    slot.spent(1.0)
    slot.charge(charged.append)
    slot.spent(2.0)
    assert charged == [1.0 + CONNECTION_SECONDS, 2.0]


def test_body_that_comes_steadily_may_take_long_and_one_that_does_not_come_is_refused(tmp_path: Path) -> None:
    """Each piece earns two hundred times the pause after it."""
    row = b'{"prompt": "a", "answer": ""}\n'
    with served(tmp_path, body_seconds=1.0) as service, admin_of(service) as admin:

        def steadily() -> Iterator[bytes]:
            for _ in range(12):
                yield row * (20 * int(BODY_RATE) // len(row) + 1)
                time.sleep(0.1)

        assert admin.post("/api/v1/datasets", content=steadily()).status_code == 201
        assert metric(service, "bodies_slow_total") == 0
        url = httpx.URL(service.url)
        with socket.create_connection((url.host, url.port or 80), timeout=60) as silent:
            head = f"POST /api/v1/jobs/dry-run HTTP/1.1\r\nHost: x\r\nX-API-Key: {service.key}\r\n"
            silent.sendall(f"{head}Content-Length: 9\r\n\r\n".encode())
            assert silent.recv(1 << 16)[9:12] == b"408"
        assert metric(service, "bodies_slow_total") == 1 and admin.get("/api/v1/jobs").status_code == 200


@pytest.mark.parametrize("taken", [0, 1], ids=["nothing", "a-byte-at-a-time"])
def test_client_that_reads_hardly_anything_is_disconnected(tmp_path: Path, taken: int) -> None:
    """It leaves a large response waiting in the service. A byte now and then is no progress."""
    with served(tmp_path, stall_seconds=0.5) as service, admin_of(service) as admin:
        url = httpx.URL(service.url)
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect((url.host, url.port or 80))
            request = f"GET /openapi.json HTTP/1.1\r\nHost: x\r\nX-API-Key: {service.key}\r\n\r\n".encode()
            deadline = time.monotonic() + 60
            while metric(service, "readers_slow_total") == 0 and time.monotonic() < deadline:
                with suppress(OSError):
                    silent.sendall(request)
                    time.sleep(0.1)  # faster ones are a flood, before the half second is over
                    silent.recv(taken)
            assert metric(service, "readers_slow_total") > 0
        assert admin.get("/api/v1/health").status_code == 200


# --- environment hosts ------------------------------------------------------------------------------------------------


def dialled(service: EmbeddedService, key: str, instance: str) -> tuple[ClientConnection, protocol.HostWelcome]:
    """A welcomed host of the key's tenant."""
    url, headers = service.url.replace("http", "ws", 1) + "/wire/host", {"Authorization": f"Bearer {key}"}
    with warnings.catch_warnings(action="ignore"):  # some of them are left to themselves
        host = connect(url, additional_headers=headers, max_size=None, close_timeout=2)
    host.send(protocol.encode(protocol.HostHello(protocol=protocol.PROTOCOL, instance=instance, environments=[])))
    welcome = protocol.decode(protocol.to_host, bytes(host.recv(timeout=60)))
    assert isinstance(welcome, protocol.HostWelcome)
    return host, welcome


def keys_of(service: EmbeddedService, *names: str) -> list[str]:
    with admin_of(service) as admin:
        tenants = [admin.post("/api/v1/tenants", json={"name": name}).json()["id"] for name in names]
        return [admin.post(f"/api/v1/tenants/{id}/keys", json={}).json()["key"] for id in tenants]


def test_hosts_of_a_tenant_are_bounded(tmp_path: Path) -> None:
    """A connected host is never closed for another connection, so a tenant could make the service unreachable."""
    with served(tmp_path, tenant_hosts=3) as service, ExitStack() as opened:
        greedy, other = keys_of(service, "greedy", "other")
        mine = [opened.enter_context(dialled(service, greedy, f"host-{number}")[0]) for number in range(3)]
        with pytest.raises(InvalidStatus) as refused:
            dialled(service, greedy, "host-3")
        response = refused.value.response
        assert response.status_code == 429 and int(response.headers["Retry-After"]) > 0
        assert b"3 environment hosts of yours are connected, allowed: at most 3" in response.body
        assert metric(service, "refused_tenant_hosts_total") == 1
        opened.enter_context(dialled(service, other, "host-0")[0])
        mine[0].close()

        def another() -> ClientConnection | None:
            with suppress(InvalidStatus):  # the place of the one that left is not free yet
                return dialled(service, greedy, "host-4")[0]
            return None

        opened.enter_context(until(another))


def test_episodes_that_a_host_brings_back_are_bounded(tmp_path: Path) -> None:
    """The names of half a million fit into a hello, and each is looked up while everybody waits."""
    with served(tmp_path) as service:
        url = service.url.replace("http", "ws", 1) + "/wire/host"
        headers = {"Authorization": f"Bearer {keys_of(service, 'ada')[0]}"}
        for count, welcomed in ((MOST_EPISODES, True), (MOST_EPISODES + 1, False)):
            hello = protocol.HostHello(
                protocol=protocol.PROTOCOL, instance=f"host-{count}", environments=[], episodes=["a"] * count
            )
            with warnings.catch_warnings(action="ignore"):
                host = connect(url, additional_headers=headers, max_size=None, close_timeout=2)
            with host:
                host.send(protocol.encode(hello))
                answer = protocol.decode(protocol.to_host, bytes(host.recv(timeout=60)))
                assert isinstance(answer, protocol.HostWelcome if welcomed else protocol.HelloRejected)
                if isinstance(answer, protocol.HelloRejected):
                    assert "episodes" in answer.reason


def test_messages_of_a_tenants_host_are_bounded(tmp_path: Path) -> None:
    with served(tmp_path, host_bytes=1 << 16) as service:
        host, welcome = dialled(service, keys_of(service, "ada")[0], "host")
        assert welcome.max_bytes == 1 << 16
        with host, pytest.raises(ConnectionClosed) as closed:
            host.send(bytes((1 << 16) + 1))
            host.recv(timeout=60)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


MASK = bytes(4)

FLOODS = {
    "fragments": b"\x02\x80" + MASK + (b"\x00\x80" + MASK) * 40_000,
    "filled fragments": b"\x02\x80" + MASK + (b"\x00\x81" + MASK + b"x") * 40_000,
    "pings": (b"\x89\x80" + MASK) * 40_000,
    "messages": (b"\x82\x81" + MASK + b"\xc0") * 40_000,
}


@pytest.mark.parametrize("flood", FLOODS)
def test_flood_of_small_frames_delays_no_other_client(tmp_path: Path, flood: str) -> None:
    """A read of the socket has 40,000 of them, and each takes 10 µs; fragments without end were kept."""
    with served(tmp_path) as service:
        [key] = keys_of(service, "ada")
        hosts = [dialled(service, key, f"host-{number}")[0] for number in range(4)]
        with pauses(service) as waited, ThreadPoolExecutor(len(hosts)) as senders:

            def send(host: ClientConnection) -> None:
                with suppress(OSError):
                    for _ in range(4):
                        host.socket.sendall(FLOODS[flood])

            list(senders.map(send, hosts))
            for host in hosts:
                with pytest.raises(ConnectionClosed):
                    host.recv(timeout=60)
        assert max(waited) < 1, sorted(waited)[-5:]
        assert metric(service, "connections_flooding_total") == (0 if flood == "messages" else len(hosts))


@pytest.mark.parametrize(
    ("path", "found", "waits"),
    [
        ("/metrics", {}, True),
        ("/api/v1/jobs", {}, True),
        ("/nothing", {}, True),
        ("/wire/artifacts/0", {}, True),
        ("/wire/artifacts/0", {"signed": True}, False),
        ("/healthz", {}, False),
        ("/readyz", {}, False),
        ("/api/v1/jobs", {"caller": Caller("bob", "tenant", "")}, False),
        ("/api/v1/jobs", {"caller": Caller("ada", "tenant", ""), "account": RequestAccount(0.0)}, False),
        ("/api/v1/jobs", {"caller": Caller("ada", "tenant", "")}, True),
        ("/api/v1/jobs", {"caller": Caller("ada", "host", "")}, True),
        ("/api/v1/jobs", {"caller": Caller("ada", "worker", "")}, True),
        ("/wire/worker", {"caller": Caller("ada", "host", "")}, True),
        ("/wire/worker", {"caller": Caller("ada", "tenant", ""), "account": RequestAccount(0.0)}, True),
        ("/wire/worker", {"caller": Caller("bob", "host", "")}, False),
    ],
)
async def test_responses_wait_whose_sender_did_not_wait_for_its_turn(
    path: str, found: dict[str, Any], waits: bool
) -> None:
    """Responses without a valid key wait for the share of their address, refusals of the tenant ada for that of ada.
    Probes, workers with a signature or a ticket, tenants within their share and requests that began do not wait."""
    kind = "websocket" if path == "/wire/worker" else "http"
    response = "websocket.http.response" if kind == "websocket" else "http.response"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"].update(found)
        await send({"type": f"{response}.start", "status": 200, "headers": []})
        await send({"type": f"{response}.body", "body": b"x"})

    clock, sent, wire = SystemClock(), list[str](), Wire()
    tenants = ServiceTime(clock, lambda tenant: 1.0, TooManyRequests, lambda: {"ada", "bob"})
    tenants.spend("ada", 1000.0)
    keyless = KeylessTime(clock, lambda: True)
    hosts = tenants.apart(longest_pause=1000.0)
    hosts.spend("ada", 1000.0)
    quotas = SimpleNamespace(service_time=tenants, host_time=hosts, keyless_time=keyless)
    connections = Connections(10, Counter())
    context = SimpleNamespace(rooms=SimpleNamespace(quotas=quotas))
    service = SimpleNamespace(context=context, connections=connections)
    keyless.spend("::1", 1000.0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    slot = Slot(wire, "::1")
    scope = {
        "type": kind, "path": path, "client": ("::1", 1), "state": {"slot": slot},
        "app": SimpleNamespace(state=SimpleNamespace(context=service)),
    }  # fmt: skip
    request = asyncio.create_task(TimeKeeper(app)(scope, cast(Any, None), send))
    await settle()
    assert request.done() is not waits and len(sent) == (0 if waits else 2)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def test_a_refusal_for_which_there_is_no_place_closes_its_connection() -> None:
    """Its client reads the status; the connection is no flood."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["caller"] = Caller("ada", "tenant", "")
        await send({"type": "http.response.start", "status": 429, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    tenants, sent = ServiceTime(SystemClock(), lambda tenant: 1.0, TooManyRequests, lambda: {"bob"}), list[Any]()
    tenants.spend("ada", 1000.0)
    waiting = [asyncio.create_task(tenants.turn("ada", lambda: False)) for _ in range(REFUSED_WAITING)]
    await settle()
    quotas = SimpleNamespace(service_time=tenants, host_time=tenants, keyless_time=None)
    refusals = Counter[str]()
    context = SimpleNamespace(rooms=SimpleNamespace(quotas=quotas))
    service = SimpleNamespace(context=context, connections=Connections(10, refusals))

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "path": "/api/v1/jobs", "client": ("::1", 1), "state": {"slot": Slot(Wire(), "::1")},
        "app": SimpleNamespace(state=SimpleNamespace(context=service)),
    }  # fmt: skip
    await TimeKeeper(app)(scope, cast(Any, None), send)
    assert [message.get("status") for message in sent] == [429, None] and not refusals
    assert sent[0]["headers"] == [(b"connection", b"close")]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("role", ["tenant", "host"])
def test_requests_of_every_role_count_against_the_rate(role: str, tmp_path: Path) -> None:
    """Also those that the role may not send; the service's time for them is the tenant's."""
    with served(tmp_path) as service, admin_of(service) as admin:
        tenant = admin.post("/api/v1/tenants", json={"name": "ada"}).json()["id"]
        assert admin.put(f"/api/v1/tenants/{tenant}/limits", json={"requests_per_second": 0.1}).status_code == 200
        key = admin.post(f"/api/v1/tenants/{tenant}/keys", json={"role": role}).json()["key"]
        before = service_seconds(service, "ada")
        with httpx.Client(base_url=service.url, headers={"X-API-Key": key}, timeout=60) as client:
            found = Counter(client.get("/api/v1/jobs").status_code for _ in range(10))
        assert found == {429: 10}, found
        assert service_seconds(service, "ada") > before


class Wire(asyncio.Transport):
    """A transport whose ``reading`` a protocol pauses."""

    reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write(self, data: object) -> None:
        pass

    def is_closing(self) -> bool:
        return False


def test_requests_and_sockets_of_keys_end_when_they_expire() -> None:
    """Requests and WebSockets; a connection that waits for its next request stays."""
    aborted = list[str]()

    class Named(Wire):
        def __init__(self, name: str) -> None:
            super().__init__()
            self._name = name

        def abort(self) -> None:
            aborted.append(self._name)

    async def watched() -> list[list[str]]:
        connections, clock, found = Connections(20, Counter()), VirtualClock(), list[list[str]]()
        for name, key, seconds in [
            ("brief", "a", 10.0), ("brief too", "a", 10.0), ("socket", "a", 10.0), ("idle", "a", 10.0),
            ("renewed", "a", 10.0), ("signed in", "b", 20.0), ("the key itself", "b", math.inf),
        ]:  # fmt: skip
            slot = connections.admit(Named(name), name)
            assert slot is not None
            slot.idle = name in ("idle", "socket")
            if name == "socket":
                connections.upgraded(slot)
            connections.opened(slot, key, clock.time() + seconds)
            if name == "renewed":  # the next request on it had a longer one
                connections.opened(slot, "c", clock.time() + 100.0)
        watching = asyncio.create_task(connections.watch(clock))
        for seconds in (9.0, 3.0, 10.0):
            await clock.sleep(seconds)
            found.append(sorted(aborted))
        watching.cancel()
        assert len(connections) == 3
        return found

    brief = ["brief", "brief too", "socket"]
    assert run(watched()) == [[], brief, sorted([*brief, "signed in"])]


async def test_a_socket_whose_tenant_is_late_is_not_read() -> None:
    """Nor one whose messages nobody takes."""
    wire, late = Wire(), 0.0
    slot, taken, more = Slot(wire, "::1"), list[Any](), asyncio.Semaphore(0)
    slot.charge(lambda seconds: None, lambda: late)

    async def take(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "websocket.accept"})
        while True:
            taken.append(await receive())
            await more.acquire()

    context = SimpleNamespace(connections=Connections(10, Counter()))
    config = uvicorn.Config(take, ws_per_message_deflate=False, ws_ping_interval=None, log_config=None)
    config.load()
    config.app = SimpleNamespace(state=SimpleNamespace(context=context))  # type: ignore[assignment]
    reader = BoundedWebSocket(config, ServerState(), {"slot": slot})
    reader.connection_made(wire)
    reader.data_received(
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    more.release()
    await settle()
    late = 0.01
    reader.data_received(FLOODS["messages"])
    await settle()
    assert len(taken) == 1 and reader.queue.empty() and not wire.reading, "the tenant is beyond its share"
    late = 0.0
    await eventually(lambda: len(taken) == 2)
    assert QUEUED <= reader.queue.qsize() < 10 * QUEUED and not wire.reading
    for _ in range(40_000):
        more.release()
    await eventually(lambda: len(taken) == 40_001 and wire.reading)
    [task] = reader.tasks
    task.cancel()


class Unread(Wire):
    """The transport of a client that reads ``taken`` bytes and no more."""

    def __init__(self, taken: int) -> None:
        super().__init__()
        self.left, self.waiting, self.open = taken, 0, True
        self.protocol: Any = None

    def write(self, data: object) -> None:
        size = len(cast(bytes, data))
        self.waiting += max(0, size - self.left)
        self.left = max(0, self.left - size)
        if self.waiting > HIGH_WATER_LIMIT:
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def close(self) -> None:
        """asyncio would close it once all is read."""

    def abort(self) -> None:
        self.open = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("::1", 1) if name == "peername" else default


@pytest.mark.parametrize("size", [100, SENT_BYTES, SENT_BYTES + 1, 3_000_000])
@pytest.mark.parametrize("closes", [False, True], ids=["kept", "closed"])
async def test_an_unread_response_is_dropped_with_its_connection(size: int, closes: bool) -> None:
    """Also one alone, whole or its end, on a connection that sends nothing more, or is closed after it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["signed"] = True
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
        await send({"type": "http.response.body", "body": bytes(size)})

    refusals = Counter[str]()
    connections = Connections(10, refusals, replace(EDGE_RULES, stall_seconds=0.05))
    quotas = SimpleNamespace(service_time=ServiceTime(SystemClock(), lambda tenant: 1.0, TooManyRequests))
    rooms = SimpleNamespace(rooms=SimpleNamespace(quotas=quotas))
    service = SimpleNamespace(context=rooms, connections=connections, refusals=refusals)
    config = uvicorn.Config(TimeKeeper(app), log_config=None, http=BoundedHttp)
    config.load()

    async def loaded(scope: Any, receive: Any, send: Any) -> None:
        with suppress(ClientDisconnect):
            await TimeKeeper(app)({**scope, "app": holder}, receive, send)

    holder = SimpleNamespace(state=SimpleNamespace(context=service, sockets=()))
    config.loaded_app = loaded
    config.app = holder  # type: ignore[assignment]
    wire = Unread(0)
    client = BoundedHttp(config, ServerState(), {})
    wire.protocol = client
    client.connection_made(wire)
    most = 0
    client.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n" + b"Connection: close\r\n" * closes + b"\r\n")
    async with asyncio.timeout(30):
        while wire.open:
            most = max(most, wire.waiting)
            await asyncio.sleep(0.01)
    assert refusals == {"readers_slow": 1} and most <= HIGH_WATER_LIMIT + 2 * SENT_BYTES


async def test_large_responses_of_a_tenant_wait_for_each_other() -> None:
    room, sizes = ResponseRoom(), [RESPONSE_BYTES, 1, RESPONSE_BYTES // 2, RESPONSE_BYTES // 2, 2 * RESPONSE_BYTES]
    held = 0
    most: list[int] = []

    async def send(size: int) -> None:
        nonlocal held
        await room.take("ada", size)
        held += size
        most.append(held - (size if held == size else 0))
        await settle(1)
        held -= size
        room.give("ada", size)

    await asyncio.gather(*(send(size) for _ in range(5) for size in sizes))
    assert len(most) == 25 and max(most) <= RESPONSE_BYTES, "one alone may be larger"


async def test_a_large_response_does_not_wait_for_ever() -> None:
    room = ResponseRoom(longest_wait=0.01)
    await room.take("ada", 1)
    with pytest.raises(TooManyRequests, match="1 bytes of responses to you"):
        await room.take("ada", RESPONSE_BYTES)
    await room.take("bob", 2 * RESPONSE_BYTES)


def all_routes() -> list[APIRoute]:
    """Of every API, once."""
    modules = [*map(import_module, ROUTE_MODULES), tinker_calls, tinker_sessions]
    routers = [router for module in modules for router in vars(module).values() if isinstance(router, APIRouter)]
    found = {id(route): route for router in routers for route in router.routes}
    return [route for route in found.values() if isinstance(route, APIRoute)]


def test_every_response_that_threads_make_has_room() -> None:
    """Such a response is large, or made of much."""
    found = list[str]()
    for route in all_routes():
        source = inspect.getsource(route.endpoint)
        if "GET" in route.methods and re.search(r"encoders|view_response|activity\.trace|targets\(", source):
            found.append(route.path)
            needed = [getattr(needed.call, "__name__", "") for needed in route.dependant.dependencies]
            assert "roomy" in needed or "make_room" in source, route.path
    assert len(found) > 12


def test_every_request_that_reads_page_after_page_waits_for_its_share_in_between() -> None:
    """Its length is the tenant's choice, such as a filter that nothing passes."""
    found = list[str]()
    for route in all_routes():
        source = inspect.getsource(route.endpoint)
        nodes = [*ast.walk(ast.parse(source))]
        loops = [[*ast.walk(node)] for node in nodes if isinstance(node, ast.For | ast.While | ast.AsyncFor)]
        if "store.read(" in source and any(isinstance(node, ast.Await) for loop in loops for node in loop):
            found.append(route.path)
            assert "state.pause()" in source, route.path
    assert found


def test_whole_responses_are_sent_in_pieces() -> None:
    for size in (0, 1, SENT_BYTES, SENT_BYTES + 1, 5 * SENT_BYTES):
        for more in (False, True):
            body = random.randbytes(size)
            parts = [*parts_of({"type": "http.response.body", "body": body, "more_body": more})]
            assert b"".join(part["body"] for part in parts) == body
            assert all(len(part["body"]) <= SENT_BYTES for part in parts)
            assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [more]
            assert more or len(parts) == 1 or not parts[-1]["body"], "its end comes when the rest is read"


@pytest.mark.parametrize(("size", "count"), [(2, 2000), (100_000, 20)])
def test_a_host_that_is_closed_during_its_messages_gets_the_close(size: int, count: int, tmp_path: Path) -> None:
    """Nobody takes those that follow a wrong one, and the host's own close comes after them."""
    with served(tmp_path) as service:
        host, _ = dialled(service, keys_of(service, "ada")[0], "host")
        frame = b"\x82\xff" + size.to_bytes(8) + MASK + b"\xc1" + bytes(size - 1)
        host.socket.sendall(frame * count)
        with pytest.raises(ConnectionClosed):  # after a twentieth of a second, where it came after eleven
            host.recv(timeout=8)


def test_messages_of_a_tenants_host_are_read_at_its_share(tmp_path: Path) -> None:
    """They wait in the sockets, and the host stays connected."""
    share = 0.1
    with served(tmp_path, tenant_service_share=share) as service:
        host, welcome = dialled(service, keys_of(service, "ada")[0], "host")
        late = protocol.Observation(epoch=welcome.epoch, call="a", episode="a", tokens=[1] * 100_000)
        message = protocol.encode(late)  # of 100 kB, read in 3 ms
        flood = memoryview(b"\x82\xff" + len(message).to_bytes(8) + MASK + message)
        until(lambda: metric(service, "environment_hosts") == 2)  # with the service's
        before, began, sent = service_seconds(service, "ada"), time.monotonic(), 0
        with host:
            while time.monotonic() - began < 1:
                try:
                    sent += host.socket.send(flood[sent % len(flood) :], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    time.sleep(0.01)
            until(lambda: service_seconds(service, "ada") > before)
            seconds = service_seconds(service, "ada") - before
            assert metric(service, "environment_hosts") == 2
        assert seconds < BURST + share * (time.monotonic() - began) + 0.1


# --- keys -------------------------------------------------------------------------------------------------------------


def test_wrong_keys_are_limited_and_valid_ones_are_not(tmp_path: Path) -> None:
    with served(tmp_path, failed_keys_per_minute=3) as service, admin_of(service) as admin:
        assert admin.get("/api/v1/health").status_code == 200
        for path in ("/api/v1/health", "/v1/models", "/tinker/api/v1/sessions"):
            wrong = {"X-API-Key": f"tml-wrong{path}"}
            assert httpx.get(service.url + path, headers=wrong, timeout=60).status_code == 401
        for path in ("/api/v1/health", "/v1/models", "/tinker/api/v1/sessions"):
            response = httpx.get(service.url + path, headers={"X-API-Key": "tml-wrong"}, timeout=60)
            assert response.status_code == 429 and int(response.headers["Retry-After"]) > 0, response.text
        for path in ("/wire/worker", "/wire/host"):
            with pytest.raises(InvalidStatus) as refused:
                connect(service.url.replace("http", "ws", 1) + path, additional_headers={"X-API-Key": "tml-wrong"})
            assert refused.value.response.status_code == 429
        assert admin.get("/api/v1/health").status_code == 200
        assert metric(service, "keys_failed_total") == 3 and metric(service, "keys_limited_total") == 5


async def test_wrong_keys_of_one_moment_are_tried_no_more_than_one_by_one() -> None:
    """All that came while the first one was looked up were looked up."""
    failed, tried = FailedKeys(3, ["known"]), list[str]()

    async def look_up(key: str) -> None:
        tried.append(key)
        await settle(1)
        if key.startswith("wrong"):
            raise Unauthorized("unknown")

    async def request(key: str, address: str = "here") -> str:
        try:
            async with failed.turn(address, key):
                await look_up(key)
        except (Unauthorized, TooManyRequests) as error:
            return type(error).__name__
        return "valid"

    right = ["right"] * 5 + [f"right-{number}" for number in range(50)]
    assert await asyncio.gather(*map(request, right)) == ["valid"] * 55
    tried.clear()
    found = await asyncio.gather(*(request(f"wrong-{number}") for number in range(50)))
    assert found == ["Unauthorized"] * 3 + ["TooManyRequests"] * 47 and len(tried) == 3
    assert await asyncio.gather(*map(request, [*right, "known"])) == ["valid"] * 56
    assert await request("right-new") == "TooManyRequests"
    assert await request("right-new", "elsewhere") == "valid"
    async with failed.turn("elsewhere", "episode", agent=True):
        pass
    for number in range(20_000):
        async with failed.turn("elsewhere", f"episode-{number}", agent=True):
            pass
    assert await request("right-49") == "valid", "keys of episodes push out no tenant's"
    assert await request("episode") == "TooManyRequests"


async def test_a_key_that_is_revoked_while_it_is_read_opens_nothing() -> None:
    begun, free, row = threading.Event(), threading.Event(), [KeyRow(hash="key", tenant="alice", label="", created=0.0)]

    class Reads:
        def read(self, function: Any, name: str, *given: Any) -> Any:
            found = next(iter(row), None)
            begun.set()
            assert free.wait(60)
            return found

    keys = Keys(cast(Database, Reads()), SystemClock())
    first = asyncio.create_task(keys.find("key"))
    await asyncio.to_thread(begun.wait)
    row.clear()
    keys.forget("key")
    free.set()
    assert await first is None, "what it opens now would stay open"
    assert await keys.find("key") is None
    keys.close()


async def test_stored_keys_of_agents_are_read_apart_and_charged_to_the_request() -> None:
    """They were read in front of all tenants' work, for nobody."""
    begun, free, charged, reads = threading.Event(), threading.Event(), list[float](), list[str]()
    standing = jobs.EpisodeStanding("alice", "job", "one two", "done", "", "running", None)

    class Reads:
        def read(self, function: Any, name: str, *given: Any) -> Any:
            reads.append(name)
            if function is not jobs.find_episode:
                return KeyRow(hash=name, tenant="alice", label="", created=0.0, role="tenant")
            begun.set()
            assert free.wait(60)
            return standing

    keys = Keys(cast(Database, Reads()), SystemClock())
    SPENT.set(charged.append)
    asked = [asyncio.create_task(keys.episode("one", f"episode-{number}")) for number in range(3)]
    await asyncio.to_thread(begun.wait)
    assert await keys.find("key") is not None, "a tenant's key waits for no agent's"
    free.set()
    assert await asyncio.gather(*asked) == [standing] * 3
    assert await keys.episode("two", "episode-0") is standing
    assert reads.count("episode-0") == 1, "it has ended, and is known for a while"
    await keys.episode("wrong", "episode-0")
    assert reads.count("episode-0") == 2, "a key that it does not have may be new"
    standing = replace(standing, state="open")
    for _ in range(2):
        assert (await keys.episode("one", "episode-9")) is standing
    assert reads.count("episode-9") == 2, "one that runs may end"
    assert len(charged) == len(reads)
    keys.close()
