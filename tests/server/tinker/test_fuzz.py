"""No body of any request makes the Tinker API fail. Bodies are derived from the SDK's schema, whole and mangled; they
name what exists, so that many are carried out."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx
import psutil
import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from tests.support.faces import MODEL, ThreadedWorker, served
from tests.support.fuzzing import Failures, fuzzed, mangled, of_schema
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from rookery.server.launcher import EmbeddedService
from rookery.server.tinker import calls, protobuf, sessions

EXAMPLES = 20
"""Requests per route and key, the same ones in each run: `make fuzz` sends 200 new ones."""

KINDS: dict[str, Any] = {
    "client/config": types.ClientConfigRequest,
    "client/dynamic_config": types.ClientConfigRequest,
    "create_session": types.CreateSessionRequest,
    "session_heartbeat": types.SessionHeartbeatRequest,
    "create_model": types.CreateModelRequest,
    "get_info": types.GetInfoRequest,
    "optim_step": types.OptimStepRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "save_weights_external": types.SaveWeightsExternalRequest,
    "load_weights": types.LoadWeightsRequest,
    "create_sampling_session": types.CreateSamplingSessionRequest,
    "asample": types.SampleRequest,
    "retrieve_future": types.FutureRetrieveRequest,
    "cancel_future": types.FutureRetrieveRequest,
    "telemetry": types.TelemetrySendRequest,
}
"""The SDK's type of each route's body."""

PLAIN: dict[str, dict[str, Any]] = {
    "sessions/{session}/finish": {"type": "object", "properties": {"reason": {"type": "object"}}},
    "training_runs/{run}/checkpoints/{kind}/{name}/ttl": {
        "type": "object", "properties": {"ttl_seconds": {"type": "number"}},
    },
    "weights_info": {"type": "object", "properties": {"tinker_path": {"type": "string"}}, "required": ["tinker_path"]},
}  # fmt: skip
"""Schemas of bodies that the SDK writes without a type."""


@dataclass
class Tenant:
    """A key's client, and the names of what it has."""

    http: httpx.Client
    names: dict[str, list[Any]] = field(default_factory=dict)

    def post(self, route: str, **body: Any) -> Any:
        return self.http.post(f"/{route}", json=body).raise_for_status().json()

    def result(self, route: str, **body: Any) -> Any:
        request = self.post(route, **body)["request_id"]
        deadline = time.monotonic() + 60
        while (found := self.http.post("/retrieve_future", json={"request_id": request})).headers[
            "content-type"
        ] == "application/json" and found.json().get("type") == "try_again":
            assert time.monotonic() < deadline, found.text
        return found

    def begin(self) -> None:
        """A session with a model, a sampler and a checkpoint."""
        session = self.post("create_session")["session_id"]
        lora = {"rank": 4}
        self.result("create_model", session_id=session, model_seq_id=0, base_model=MODEL, lora_config=lora)
        model = f"{session}:train:0"
        saved = self.result("save_weights", model_id=model, path="kept").json()["path"]
        sampler = self.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=MODEL)
        self.names = {
            "session_id": [session], "model_id": [model], "sampling_session_id": [sampler["sampling_session_id"]],
            "path": [saved, "kept", "other"], "tinker_path": [saved], "model_path": [saved, None],
            "request_id": [f"{model}/1", f"{model}/99", f"{sampler['sampling_session_id']}/0"],
            "base_model": [MODEL, None], "seq_id": [None, 1, 2], "model_seq_id": [0, 1, 2], "rank": [1, 4, 64],
            "sampling_session_seq_id": [0, 1], "tokens": [[1, 2, 3]], "top_p": [1.0], "top_k": [-1],
            "session": [session], "run": [model], "sampler": [sampler["sampling_session_id"]],
            "kind": ["weights", "sampler_weights", "snapshot", "inflight"], "name": ["kept", "other"],
        }  # fmt: skip


@pytest.fixture(scope="module")
def failures() -> Iterator[list[str]]:
    with Failures() as failures:
        yield failures.records


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, failures: list[str]) -> Iterator[EmbeddedService]:
    root = tmp_path_factory.mktemp("fuzz")
    patience = {"session_poll": 0.02, "session_seq_gap": 0.1, "heartbeat_seconds": 0.1}
    with served(root, **patience) as service, ThreadedWorker.of(service):
        yield service


@pytest.fixture(scope="module", params=["administrator", "tenant"])
def tenant(service: EmbeddedService, request: pytest.FixtureRequest) -> Iterator[Tenant]:
    key = service.key
    if request.param == "tenant":
        with httpx.Client(base_url=f"{service.url}/api/v1", headers={"X-API-Key": key}, timeout=60) as admin:
            id = admin.post("/tenants", json={"name": "ada"}).json()["id"]
            key = admin.post(f"/tenants/{id}/keys", json={}).json()["key"]
    with httpx.Client(base_url=f"{service.url}/tinker/api/v1", headers={"X-API-Key": key}, timeout=60) as http:
        tenant = Tenant(http)
        tenant.begin()
        yield tenant


def test_every_route_is_known_to_this_test() -> None:
    routes = [route for router in (calls, sessions) for route in router.routes.routes]
    written = {
        route.path.removeprefix("/")
        for route in routes
        if isinstance(route, APIRoute) and route.methods & {"POST", "PUT"} and route.include_in_schema
    }
    assert written == {*KINDS, *PLAIN, "forward_backward"}


def named(schema: Any, tenant: Tenant) -> st.SearchStrategy[Any]:
    """Bodies of a schema whose names are mostly those of what exists."""

    def fill(draw: st.DrawFn, value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: draw(st.sampled_from(tenant.names[key]))
                if key in tenant.names and draw(st.integers(0, 9))
                else fill(draw, inner)
                for key, inner in value.items()
            }
        return [fill(draw, inner) for inner in value] if isinstance(value, list) else value

    plain = of_schema(schema)

    @st.composite
    def filled(draw: st.DrawFn) -> Any:
        return fill(draw, draw(plain))

    return mangled(filled())


def check(reply: httpx.Response, sent: Any) -> None:
    assert reply.status_code < 500, (reply.request.url, sent, reply.text)
    if reply.status_code >= 400:
        assert len(reply.json()["error"]) < 2000


@pytest.mark.parametrize("path", [*KINDS, *PLAIN])
def test_no_json_body_fails_the_service(
    service: EmbeddedService, tenant: Tenant, failures: list[str], path: str
) -> None:
    schema = PLAIN.get(path) or KINDS[path].model_json_schema()
    if path == "optim_step":  # the SDK writes them under another name
        schema["properties"]["adam_params"] = schema["properties"].pop("optim_params")
        schema["required"] = ["model_id"]
    method = "PUT" if path.endswith("ttl") else "POST"

    @fuzzed(EXAMPLES)
    @given(named(schema, tenant), st.data())
    def run(body: Any, data: st.DataObject) -> None:
        if path == "sessions/{session}/finish":
            tenant.names["session"] = [tenant.post("create_session")["session_id"]]
        given = path.format(**{name: data.draw(st.sampled_from(names)) for name, names in tenant.names.items()})
        content = json.dumps(body).encode()
        check(
            tenant.http.request(method, f"/{given}", content=content, headers={"Content-Type": "application/json"}),
            body,
        )

    run()
    assert not failures


READS = sorted(
    route.path.removeprefix("/")
    for router in (calls, sessions)
    for route in router.routes.routes
    if isinstance(route, APIRoute) and "GET" in route.methods
)
READ_EXAMPLES = 5
"""Pairs of requests per route that is read, and key."""

SEGMENT = st.text(st.characters(codec="utf-8"), max_size=20).map(lambda text: quote(text, safe=""))


@pytest.mark.parametrize("path", READS)
def test_no_path_or_query_fails_the_service(tenant: Tenant, failures: list[str], path: str) -> None:
    """The route is read with names of what exists; then it gets any method with any names."""
    fields = re.findall(r"{(\w+)}", path)
    known = {name: st.sampled_from(tenant.names.get(name, tenant.names["name"])) for name in fields}

    @fuzzed(READ_EXAMPLES)
    @given(
        existing=st.fixed_dictionaries(known),
        any_names=st.fixed_dictionaries({name: strategy | SEGMENT for name, strategy in known.items()}),
        method=st.sampled_from(["GET", "GET", "DELETE", "POST", "PATCH"]),
        query=st.dictionaries(
            st.sampled_from(["limit", "offset", "x"]), st.integers() | st.text(max_size=5), max_size=2
        ),
    )
    def run(existing: dict[str, str], any_names: dict[str, str], method: str, query: dict[str, Any]) -> None:
        if method == "DELETE":  # what exists stays for the other tests
            any_names |= {"session": "x", "name": "other", "sampler": "x"} if fields else {}
        for used, names in (("GET", existing), (method, any_names)):
            given = path.format(**names)
            check(tenant.http.request(used, f"/{given}", params=query), (used, given, query))

    run()
    assert not failures


NUMBERS = st.integers(-2, 300) | st.integers(-(2**31), 2**31 - 1)


@st.composite
def tensors(draw: st.DrawFn, count: int) -> pb.Tensor:
    """One value for each token, or anything."""
    kind, size = draw(st.sampled_from([(1, "f"), (2, "q"), (3, "i"), (0, "f"), (9, "q")])), draw(st.integers(0, 6))
    values = (
        struct.pack(f"<{count}{kind[1]}", *([1] * count)) if draw(st.integers(0, 3)) else draw(st.binary(max_size=32))
    )
    shape = draw(st.sampled_from([[], [count], [count, 1], [count, 2**40], [2**62, 4], [-1, -count], [0], [count, 0]]))
    if draw(st.integers(0, 2)):
        return pb.Tensor(dense=values, dtype=kind[0], shape=shape)
    crow = draw(
        st.sampled_from([[0] * count + [size], list(range(count + 1)), [2**62] * (count + 1), [-1] * count, []])
    )
    columns = draw(st.lists(st.integers(-1, 2**41), max_size=6))
    packed = [struct.pack(f"<{len(part)}q", *part) for part in (crow, columns)]
    return pb.Tensor(
        sparse_csr=pb.SparseCsr(values=values, crow_indices=packed[0], col_indices=packed[1]),
        dtype=kind[0],
        shape=shape,
    )


@st.composite
def requests(draw: st.DrawFn, tenant: Tenant) -> bytes:
    message = pb.ForwardBackwardRequest(
        model_id=draw(st.sampled_from([*tenant.names["model_id"], "x"])),
        seq_id=draw(st.sampled_from([0, 0, 0, 0, 1, -1, 2**31 - 1])),
        loss_fn=draw(st.sampled_from([*protobuf.INPUTS, "cross_entropy", "cross_entropy", "", "no\0ne"])),
        forward_only=draw(st.booleans()),
    )
    for name, value in draw(st.dictionaries(st.sampled_from(["beta", "x"]), st.floats(), max_size=1)).items():
        message.loss_fn_config[name] = value
    for _ in range(draw(st.integers(0, 3))):
        datum, count = message.data.add(), draw(st.integers(0, 5))
        tokens = struct.pack(f"<{count}i", *draw(st.lists(NUMBERS, min_size=count, max_size=count)))
        datum.model_input.add(
            encoded_text=pb.EncodedTextChunk(tokens=tokens + draw(st.sampled_from([b"", b"", b"", b"x"])))
        )
        names = protobuf.INPUTS.get(message.loss_fn, ((), ()))
        for name in draw(st.sampled_from([names[0], names[0], sum(names, ()), ("x",)])):
            datum.loss_fn_inputs[name].CopyFrom(draw(tensors(count)))
    content = message.SerializeToString()
    match draw(st.integers(0, 5)):
        case 0:
            return content[: draw(st.integers(0, len(content)))]
        case 1:
            at = draw(st.integers(0, len(content)))
            return content[:at] + draw(st.binary(max_size=4)) + content[at:]
    return content


def test_no_protobuf_body_fails_the_service(service: EmbeddedService, tenant: Tenant, failures: list[str]) -> None:
    """Also not a sparse tensor of four values that claims a shape of terabytes."""
    before = psutil.Process().memory_info().rss

    @fuzzed(4 * EXAMPLES)
    @given(requests(tenant), st.sampled_from([protobuf.PROTOBUF] * 9 + ["application/json"]))
    def run(body: bytes, kind: str) -> None:
        reply = tenant.http.post("/forward_backward", content=body, headers={"Content-Type": kind})
        check(reply, body)
        if reply.status_code == 200 and not len(body) % 3:
            check(tenant.http.post("/retrieve_future", json={"request_id": reply.json()["request_id"]}), body)

    run()
    assert not failures
    assert psutil.Process().memory_info().rss - before < 256 << 20


def test_the_service_lives_after_all_that(service: EmbeddedService, tenant: Tenant, failures: list[str]) -> None:
    """Another client trains, and the worker was never lost."""
    tenant.begin()
    [model] = tenant.names["model_id"]
    saved = tenant.result("save_weights", model_id=model, path="after").json()
    assert saved["path"] == f"tinker://{model}/weights/after"
    health = httpx.get(f"{service.url}/api/v1/health", headers={"X-API-Key": service.key}, timeout=60).json()
    assert health["totals"]["worker_losses"] == 0 and not failures
