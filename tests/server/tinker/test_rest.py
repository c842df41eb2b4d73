"""Checkpoints, samplers, listings and refusals of the Tinker API, with the real SDK."""

from __future__ import annotations

import io
import socket
import tarfile
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tinker
from tests.support.tinkered import MODEL, PATIENCE, TOKENS, client, datum, logprobs, new_key, steps, trainer
from tests.support.traces import check
from tinker import types

from rookery.controller.sessions.futures import Futures
from rookery.errors import StorageFull
from rookery.server.launcher import EmbeddedService
from rookery.server.peft_archive import ADAPTER_FILES
from rookery.server.tinker import schemas

PROMPT = types.ModelInput.from_ints(TOKENS)


@pytest.fixture
def rest(service: EmbeddedService) -> tinker.RestClient:
    return tinker.RestClient(base_url=f"{service.url}/tinker", api_key=service.key)


def test_state_with_and_without_the_optimizer(visitor: tinker.ServiceClient) -> None:
    training = trainer(visitor)
    steps(training, 3)
    path = training.save_state("three").result(PATIENCE).path
    assert path == f"tinker://{training.model_id}/weights/three"
    onward = steps(training, 3)
    resumed = visitor.create_training_client_from_state_with_optimizer(path).result(PATIENCE)
    assert resumed.get_info().lora_rank == 4
    assert resumed.model_id.endswith(":train:1")
    assert steps(resumed, 3) == pytest.approx(onward, rel=1e-4)
    fresh = visitor.create_training_client_from_state(path).result(PATIENCE)
    losses = steps(fresh, 3)
    assert losses[0] == pytest.approx(onward[0], rel=1e-4)  # the same weights
    assert losses[2] != pytest.approx(onward[2], rel=1e-4)  # other moments
    with pytest.warns(FutureWarning):
        training.load_state_with_optimizer(path).result(PATIENCE)
    assert steps(training, 3) == pytest.approx(onward, rel=1e-4)
    with pytest.warns(FutureWarning):
        training.load_state(path).result(PATIENCE)
    assert steps(training, 3) == pytest.approx(losses, rel=1e-4)
    with pytest.raises(tinker.RequestFailedError, match="exists already"):
        training.save_state("three").result(PATIENCE)
    assert training.save_state("three", overwrite=True).result(PATIENCE).path == path
    other = visitor.create_lora_training_client(MODEL, rank=8).result(PATIENCE)
    with pytest.warns(FutureWarning), pytest.raises(tinker.RequestFailedError, match="rank"):
        other.load_state(path).result(PATIENCE)
    with pytest.raises(tinker.NotFoundError):
        visitor.create_training_client_from_state(f"tinker://{training.model_id}/weights/none").result(PATIENCE)


def test_trace_of_a_session_has_its_calls(
    visitor: tinker.ServiceClient, rest: tinker.RestClient, service: EmbeddedService
) -> None:
    training = trainer(visitor)
    steps(training, 2)
    sampler = training.save_weights_and_get_sampling_client().result(PATIENCE)
    sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=4)).result(PATIENCE)
    session = training.model_id.partition(":")[0]
    url = rest.export_session_trace(session).result(PATIENCE)
    trace = httpx.get(url, timeout=60).raise_for_status().json()  # needs no key
    check(trace)
    events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    found = {(event["cat"], event["name"].partition(":")[0].partition(",")[0]) for event in events}
    assert {("train", "ForwardBackward"), ("train", "OptimStep")} <= found
    assert {"prefill", "decode", "commit"} <= {kind for kind, _ in found}
    head, _, ticket = url.partition("/traces/")
    for changed in (f"{head}/traces/1{ticket}", f"{url}x", url.replace(session, "other")):
        assert httpx.get(changed, timeout=60).status_code == 404
    with pytest.raises(tinker.NotFoundError):
        rest.export_session_trace("none").result(PATIENCE)


def test_samplers_snapshot_named_in_flight_and_of_the_base(visitor: tinker.ServiceClient) -> None:
    training = trainer(visitor)
    greedy = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[])

    def said(sampler: tinker.SamplingClient) -> list[float]:
        [sequence] = sampler.sample(PROMPT, 1, greedy).result(PATIENCE).sequences
        assert (len(sequence.tokens), sequence.stop_reason) == (6, "length")
        return [*sequence.tokens, *(sequence.logprobs or [])]

    base = visitor.create_sampling_client(base_model=MODEL).result(PATIENCE)
    assert base.get_base_model() == MODEL
    zero = training.save_weights_and_get_sampling_client().result(PATIENCE)
    flying = training.save_weights_and_get_sampling_client(kind="inflight").result(PATIENCE)
    assert said(zero) == said(flying) == said(base)  # an untrained adapter adds nothing
    steps(training, 2)
    path = training.save_weights_for_sampler("two").result(PATIENCE).path
    named = visitor.create_sampling_client(path).result(PATIENCE)
    assert named.get_base_model() == MODEL
    assert said(flying) == said(zero)  # until it is published
    later = training.save_weights_and_get_sampling_client(kind="inflight").result(PATIENCE)
    two = said(named)
    assert two != said(zero)
    assert said(later) == said(flying) == two
    steps(training, 1)
    assert said(named) == two
    assert said(zero) == said(base)


def test_stops_seeds_and_limits(visitor: tinker.ServiceClient) -> None:
    sampler = visitor.create_sampling_client(base_model=MODEL).result(PATIENCE)

    def sample(count: int = 1, **more: object) -> types.SampleResponse:
        params = types.SamplingParams(**{"max_tokens": 40, "seed": 5, "stop": [], **more})  # type: ignore[arg-type]
        return sampler.sample(PROMPT, count, params).result(PATIENCE)

    [plain] = sample().sequences
    assert len(plain.tokens) == 40
    stop = next(token for at, token in enumerate(plain.tokens) if at > 4 and token not in plain.tokens[:at])
    cut = plain.tokens.index(stop) + 1
    [stopped] = sample(stop=[stop]).sequences
    assert (stopped.tokens, stopped.stop_reason) == (plain.tokens[:cut], "stop")
    assert sample(seed=6).sequences[0].tokens != plain.tokens
    many = sample(count=5, max_tokens=3)
    assert len({s.sequence_id for s in many.sequences}) == 5
    assert many.sequences[0].tokens == plain.tokens[:3]
    assert sample(max_tokens=None).sequences[0].stop_reason == "length"  # to the end of the context
    with pytest.raises(tinker.BadRequestError, match="top_k and top_p"):
        sample(top_p=0.5)
    with pytest.raises(tinker.BadRequestError, match="at most 4194304 log-probabilities"):
        long = types.ModelInput.from_ints([5] * 50_000)
        sampler.sample(long, 1, types.SamplingParams(max_tokens=1), topk_prompt_logprobs=100).result(PATIENCE)
    with pytest.raises(tinker.RequestFailedError, match="context"):
        sampler.sample(types.ModelInput.from_ints(TOKENS * 50), 1, types.SamplingParams(max_tokens=1)).result(PATIENCE)


def test_stop_strings_end_a_text_with_the_token_that_completes_them(visitor: tinker.ServiceClient) -> None:
    training = trainer(visitor)
    sampler = training.save_weights_and_get_sampling_client().result(PATIENCE)
    tokenizer = training.get_tokenizer()

    def sample(stop: object) -> types.SampledSequence:
        params = types.SamplingParams(max_tokens=60, seed=5, stop=stop)  # type: ignore[arg-type]
        return sampler.sample(PROMPT, 1, params).result(PATIENCE).sequences[0]

    plain = sample([]).tokens
    assert len(plain) == 60
    readable = [at for at in range(4, 58) if tokenizer.decode(plain[at : at + 2]).isascii()]
    stop = tokenizer.decode(plain[readable[0] : readable[0] + 2])
    end = next(at for at in range(61) if stop in tokenizer.decode(plain[:at]))
    for given in (stop, [stop], ["never this", stop]):
        stopped = sample(given)
        assert (stopped.tokens, stopped.stop_reason) == (plain[:end], "stop")
        assert len(stopped.logprobs or []) == end
    earlier = next(token for token in plain[1 : end - 1] if token not in plain[:1])
    cut = plain.index(earlier) + 1
    for token in ([earlier], [earlier, plain[end]]):
        assert sample(token).tokens == plain[:cut]
    assert sample(["never this"]).tokens == sample(None).tokens, "the model's own ends stay"


def test_listings_ttl_deletion_and_information(
    visitor: tinker.ServiceClient, rest: tinker.RestClient, service: EmbeddedService
) -> None:
    training = trainer(visitor, user_metadata={"for": "test"})
    run = training.model_id
    steps(training, 1)
    kept = training.save_state("kept", user_metadata={"a": "b"}).result(PATIENCE).path
    short = training.save_state("short", ttl_seconds=3600).result(PATIENCE).path
    named = training.save_weights_for_sampler("named").result(PATIENCE).path
    found = {c.tinker_path: c for c in rest.list_checkpoints(run).result(PATIENCE).checkpoints}
    assert found.keys() == {kept, short, named}
    assert found[named].checkpoint_type == "sampler" and found[kept].user_metadata == {"a": "b"}
    assert found[short].expires_at is not None and found[kept].expires_at is None
    assert (found[kept].size_bytes or 0) > 1000
    for path in (kept, named):
        url = f"{service.url}/tinker/api/v1/training_runs/{run}/checkpoints/{path.partition(f'{run}/')[2]}/archive"
        archive = httpx.get(url, headers={"X-API-Key": service.key}, timeout=60).raise_for_status().json()
        content = httpx.get(archive["url"], timeout=60).raise_for_status().content  # needs no key
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            assert tar.getnames() == list(ADAPTER_FILES)
    rest.set_checkpoint_ttl_from_tinker_path(kept, 7200).result(PATIENCE)
    rest.set_checkpoint_ttl_from_tinker_path(short, None).result(PATIENCE)
    found = {c.tinker_path: c for c in rest.list_user_checkpoints().result(PATIENCE).checkpoints}
    assert found[short].expires_at is None and found[kept].expires_at is not None
    shown = rest.get_training_run(run).result(PATIENCE)
    assert (shown.lora_rank, shown.base_model, shown.user_metadata) == (4, MODEL, {"for": "test"})
    assert shown.last_checkpoint is not None and shown.last_checkpoint.tinker_path == short
    assert run in [r.training_run_id for r in rest.list_training_runs(limit=100).result(PATIENCE).training_runs]
    session = visitor.holder.get_session_id()
    assert session in rest.list_sessions(limit=100).result(PATIENCE).sessions
    assert rest.get_session(session).result(PATIENCE).training_run_ids == [run]
    info = rest.get_weights_info_by_tinker_path(kept).result(PATIENCE)
    assert (info.base_model, info.lora_rank, info.train_attn) == (MODEL, 4, True)
    rest.delete_checkpoint_from_tinker_path(named).result(PATIENCE)
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(named).result(PATIENCE)
    with pytest.raises(tinker.RequestFailedError, match="ttl_seconds"):
        training.save_state("soon", ttl_seconds=5).result(PATIENCE)
    models = rest.get_server_capabilities().result(PATIENCE).supported_models
    assert [(m.model_name, m.max_context_length) for m in models if m.model_name == MODEL] == [(MODEL, 512)]


def test_an_expired_checkpoint_is_gone_before_it_is_deleted(
    visitor: tinker.ServiceClient, rest: tinker.RestClient, service: EmbeddedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "TTL_SECONDS", (0, 3600))
    training = trainer(visitor)
    kept = training.save_state("kept").result(PATIENCE).path
    gone = training.save_state("gone").result(PATIENCE).path
    before = rest.list_user_checkpoints().result(PATIENCE).cursor
    rest.set_checkpoint_ttl_from_tinker_path(gone, 0).result(PATIENCE)
    listed = rest.list_user_checkpoints(limit=1000).result(PATIENCE)
    assert before is not None and listed.cursor is not None and listed.cursor.total_count == before.total_count - 1
    assert gone not in [found.tinker_path for found in listed.checkpoints]
    assert [c.tinker_path for c in rest.list_checkpoints(training.model_id).result(PATIENCE).checkpoints] == [kept]
    runs = rest.list_training_runs(limit=100).result(PATIENCE).training_runs
    for shown in (rest.get_training_run(training.model_id).result(PATIENCE), *runs):
        if shown.training_run_id == training.model_id:
            assert shown.last_checkpoint is not None and shown.last_checkpoint.tinker_path == kept
    headers = {"Authorization": f"Bearer {service.key}"}
    models = httpx.get(f"{service.url}/v1/models", headers=headers, timeout=60).raise_for_status().json()["data"]
    assert [row["id"] for row in models if row["id"] in (kept, gone)] == [kept]
    for use in (
        lambda: rest.get_weights_info_by_tinker_path(gone),
        lambda: rest.set_checkpoint_ttl_from_tinker_path(gone, None),
        lambda: rest.delete_checkpoint_from_tinker_path(gone),
    ):
        with pytest.raises(tinker.NotFoundError):
            use().result(PATIENCE)


def test_metadata_of_any_type_hides_no_run(service: EmbeddedService, rest: tinker.RestClient) -> None:
    """The SDK takes any value and reads texts alone: with another one it refuses the whole list."""
    about: dict[str, Any] = {"lr": 1e-3, "tags": ["a", "ä"], "note": "text", "none": None}
    written = {"lr": "0.001", "tags": '["a", "\\u00e4"]', "note": "text", "none": "null"}
    address = f"{service.url}/tinker"
    with tinker.ServiceClient(user_metadata=about, base_url=address, api_key=service.key) as visitor:
        run = trainer(visitor, user_metadata=about).model_id
        session = rest.get_session(visitor.holder.get_session_id()).result(PATIENCE)
        assert session.user_metadata == rest.get_training_run(run).result(PATIENCE).user_metadata == written
        assert run in [row.training_run_id for row in rest.list_training_runs(limit=100).result(PATIENCE).training_runs]


@pytest.mark.parametrize(("project", "warning"), [(None, None), ("", None), ("mine", "project_id has no effect")])
def test_a_session_of_a_project_is_warned(service: EmbeddedService, project: str | None, warning: str | None) -> None:
    asked = {"tags": [], "user_metadata": None, "sdk_version": tinker.__version__, "project_id": project}
    url, headers = f"{service.url}/tinker/api/v1/create_session", {"X-API-Key": service.key}
    made = httpx.post(url, headers=headers, json=asked, timeout=60).raise_for_status().json()
    assert (made["warning_message"] or "").startswith(warning or "") and bool(made["warning_message"]) == bool(warning)


def test_lists_refuse_parameters_that_would_choose_other_rows(
    service: EmbeddedService, rest: tinker.RestClient
) -> None:
    with pytest.raises(tinker.BadRequestError, match="projects are not supported"):
        rest.list_training_runs(project_id="mine").result(PATIENCE)
    for scope in ("owned", "accessible"):
        rest.list_training_runs(access_scope=scope).result(PATIENCE)
        rest.list_sessions(access_scope=scope).result(PATIENCE)
    base, headers = f"{service.url}/tinker/api/v1", {"X-API-Key": service.key}
    for path in ("training_runs", "sessions", "checkpoints"):
        for query, status in (("limit=1", 200), ("state=", 200), ("state=done", 400), ("limit=1&limit=2", 400)):
            reply = httpx.get(f"{base}/{path}?{query}", headers=headers, timeout=60)
            assert reply.status_code == status, reply.text
            assert status == 200 or query.partition("=")[0] in reply.json()["error"]


def test_reads_by_a_ticket_are_requests_of_the_tenant_that_got_it(service: EmbeddedService) -> None:
    """They need no key, and were therefore the service's own work, as much as anybody asked for."""
    key = new_key(service, "reader")
    with client(service, key) as visitor:
        training = trainer(visitor)
        path = training.save_state("kept").result(PATIENCE).path
        rest = tinker.RestClient(base_url=f"{service.url}/tinker", api_key=key)
        trace = rest.export_session_trace(training.model_id.partition(":")[0]).result(PATIENCE)
    url = f"{service.url}/tinker/api/v1/training_runs/{training.model_id}/checkpoints/weights/{path.rpartition('/')[2]}"
    archive = str(httpx.get(f"{url}/archive", headers={"X-API-Key": key}, timeout=60).raise_for_status().json()["url"])
    urls = [trace, archive, *(archive.rpartition("/")[0] + f"/{name}" for name in ADAPTER_FILES)]
    with httpx.Client(headers={"X-API-Key": service.key}, base_url=service.url, timeout=60) as admin:
        [row] = [row for row in admin.get("/api/v1/tenants").json() if row["name"] == "reader"]
        for url in urls:
            assert httpx.get(url, timeout=60).status_code == 200
        admin.put(f"/api/v1/tenants/{row['id']}/limits", json={"requests_per_second": 0.01}).raise_for_status()
    for url in urls:
        refused = httpx.get(url, timeout=60)
        assert refused.status_code == 429 and "requests in a second" in refused.json()["error"]


def test_finished_session_accepts_no_more_operations(service: EmbeddedService) -> None:
    visitor = client(service)
    training = trainer(visitor)
    session = visitor.holder.get_session_id()
    headers = {"X-API-Key": service.key}
    with httpx.Client(base_url=f"{service.url}/tinker/api/v1", headers=headers, timeout=60) as http:
        assert http.post("/session_heartbeat", json={"session_id": session}).status_code == 200
        visitor.close("success").result(PATIENCE)
        assert http.post("/session_heartbeat", json={"session_id": session}).status_code == 410
        late = http.post("/optim_step", json={"model_id": training.model_id, "seq_id": 1, "adam_params": {}})
        assert late.status_code == 400 and "is finished" in late.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "auth/token", 404),
        ("POST", "copy_weights", 404),
        ("POST", "sessions/search", 404),
        ("POST", "create_custom_loss", 404),
        ("PUT", "sessions/x/project", 404),
        ("POST", "training_runs/x/checkpoints/weights/y/publish", 404),
        ("GET", "training_runs/x/checkpoints/weights/y/archive", 404),
        ("GET", "no/such/thing", 404),
        ("POST", "retrieve_future", 400),
        ("POST", "create_model", 400),
        ("POST", "forward_backward", 400),
    ],
)
def test_unknown_routes_and_ids_get_an_error_at_once(
    service: EmbeddedService, method: str, path: str, status: int
) -> None:
    headers = {"X-API-Key": service.key, "Content-Type": "application/json"}
    reply = httpx.request(method, f"{service.url}/tinker/api/v1/{path}", headers=headers, content=b"{}", timeout=60)
    assert reply.status_code == status
    assert len(reply.json()["error"]) > 20


@pytest.mark.parametrize(
    ("trouble", "told"),
    [
        (StorageFull("the disk is full"), {"type": "try_again", "queue_state_reason": "the disk is full"}),
        (RuntimeError("a bug"), {"category": "server", "error": "internal error (RuntimeError); the log has it"}),
    ],
)
def test_retrieve_future_never_answers_500(
    service: EmbeddedService, monkeypatch: pytest.MonkeyPatch, trouble: Exception, told: dict[str, str]
) -> None:
    """The client would ask again at once, for ever."""

    async def wait(self: Futures, tenant: str, request: str) -> None:
        raise trouble

    monkeypatch.setattr(Futures, "wait", wait)
    headers = {"X-API-Key": service.key}
    url = f"{service.url}/tinker/api/v1/retrieve_future"
    reply = httpx.post(url, headers=headers, json={"request_id": "any"}, timeout=60)
    assert reply.status_code == 200
    assert told.items() <= reply.json().items()


@pytest.mark.parametrize("whole", [False, True])
def test_clients_that_disconnect_leave_no_traceback(
    service: EmbeddedService, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], whole: bool
) -> None:
    """As when a client is killed: while it sends a request, or while it waits for the answer."""
    body = b'{"request_id": "nothing"}'
    address = service.url.removeprefix("http://").split(":")
    for path in ("retrieve_future", "forward_backward", "asample", "optim_step"):
        with socket.create_connection((address[0], int(address[1]))) as client:
            head = f"POST /tinker/api/v1/{path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {service.key}\r\n"
            head += f"Content-Type: application/x-protobuf\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + (body if whole else body[:9]))
            time.sleep(0.1)
    time.sleep(0.5)
    assert not [record for record in caplog.records if record.exc_info]
    assert "Traceback" not in "".join(capfd.readouterr())


def test_unknown_fields_and_models_are_refused(service: EmbeddedService, visitor: tinker.ServiceClient) -> None:
    headers = {"X-API-Key": service.key}
    with httpx.Client(base_url=f"{service.url}/tinker/api/v1", headers=headers, timeout=60) as http:
        asked = {"session_id": visitor.holder.get_session_id(), "novelty": "", "sampling_session_seq_id": 99,
                 "base_model": MODEL}  # fmt: skip
        assert http.post("/create_sampling_session", json=asked).status_code == 200
        reply = http.post("/create_sampling_session", json={**asked, "novelty": 3})
        assert (reply.status_code, "novelty" in reply.text) == (400, True)
    with pytest.raises(tinker.BadRequestError, match="no model is called"):
        visitor.create_lora_training_client("Nothing").result(PATIENCE)
    with pytest.raises(tinker.BadRequestError, match=r"rank 999 is not served"):
        visitor.create_lora_training_client(MODEL, rank=999).result(PATIENCE)
    training = trainer(visitor)
    with httpx.Client(base_url=f"{service.url}/tinker/api/v1", headers=headers, timeout=60) as http:
        session, lora = visitor.holder.get_session_id(), {"rank": 4, "seed": 1}
        created = {"session_id": session, "base_model": MODEL, "lora_config": lora}
        created["model_seq_id"] = int(training.model_id.rpartition(":")[2])
        assert http.post("/create_model", json=created).json()["request_id"] == f"{training.model_id}/0"
        for other in ({"rank": 8}, {"train_attn": False}):
            reply = http.post("/create_model", json={**created, "lora_config": {**lora, **other}})
            assert (reply.status_code, "was created before" in reply.text) == (400, True)
    with pytest.raises(tinker.RequestFailedError, match="dimuon"):
        training.optim_step(types.DimuonParams(learning_rate=0.1)).result(PATIENCE)
    [scored] = logprobs(training.forward([datum(TOKENS)], "cross_entropy").result(PATIENCE))
    assert scored.shape == (11,)


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("optim_step", {"adam_params": {}, "novelty": 1}, "novelty: is not supported"),
    ("optim_step", {"adam_params": {"learning_rate": -1}}, "adam_params.learning_rate: "),
    ("optim_step", {"adam_params": {"learning_rate": True}}, "adam_params.learning_rate: "),
    ("optim_step", {"adam_params": {"beta1": "nan"}}, "adam_params.beta1: "),
    ("save_weights", {"path": "x" * 5000}, "path: "),
    ("save_weights", {"path": "a", "user_metadata": {"config": "x" * 5000}}, "user_metadata.config: "),
    ("save_weights", {"path": "a", "ttl_seconds": 1}, "ttl_seconds: "),
    ("save_weights_for_sampler", {"kind": "other"}, "kind: "),
    ("save_weights_external", {}, "path: "),
    ("load_weights", {"path": "x" * 5000}, "path: "),
    ("load_weights", {"path": "tinker://x/weights/a", "optimizer": "perhaps"}, "optimizer: "),
)
"""Operations that cannot be executed as they were sent: route, fields, and the beginning of the error."""


def test_refused_operation_takes_its_turn(service: EmbeddedService, visitor: tinker.ServiceClient) -> None:
    """Else the model's next operations would wait five minutes for its number."""
    training = trainer(visitor)
    long = training.forward_backward([datum(TOKENS * 50)], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=0.01))
    with pytest.raises(tinker.RequestFailedError, match="a datum has 599 tokens; the model's context is 512"):
        long.result(PATIENCE)
    with pytest.raises(tinker.RequestFailedError, match="no step was taken"):
        step.result(PATIENCE)
    steps(training, 1)
    training.forward_backward([datum(TOKENS)], "cross_entropy").result(PATIENCE)
    with pytest.raises(tinker.RequestFailedError, match=r"adam_params\.learning_rate: "):
        training.optim_step(types.AdamParams(learning_rate=-1e-20)).result(PATIENCE)
    left = training.optim_step(types.AdamParams(learning_rate=0.01)).result(PATIENCE)
    assert left.metrics is not None and left.metrics["grad_norm"] == 0, "a refused step drops the gradient"
    headers = {"X-API-Key": service.key}
    with httpx.Client(base_url=f"{service.url}/tinker/api/v1", headers=headers, timeout=60) as http:

        def result(number: int, route: str, fields: dict[str, Any]) -> Any:
            sent = {"model_id": training.model_id, "seq_id": number, **fields}
            first, again = (http.post(f"/{route}", json=sent).raise_for_status().json() for _ in range(2))
            assert first == again
            return http.post("/retrieve_future", json={"request_id": first["request_id"]}).raise_for_status().json()

        for number, (route, fields, told) in enumerate(REFUSED, 8):
            found = result(number, route, fields)
            assert found["category"] == "user" and found["error"].startswith(told), (route, found)
        assert result(8 + len(REFUSED), "save_weights", {"path": "kept"})["path"].endswith("/weights/kept")
        for wrong in ({"model_id": 5}, {"seq_id": 0}, {"seq_id": "x"}):  # no turn that it could take
            sent = {"model_id": training.model_id, "seq_id": 99, "adam_params": {}, **wrong}
            assert http.post("/optim_step", json=sent).status_code == 400


def test_every_route_asks_for_a_key(service: EmbeddedService) -> None:
    from fastapi.routing import APIRoute

    from rookery.server.tinker import build

    open_to_all = {
        "/api/v1/healthz", "/api/v1/traces/{ticket}/{session}",
        "/api/v1/external/{ticket}/{digest}/{file}", "/{path:path}",
    }  # fmt: skip

    def walk(routes: list) -> Iterator[APIRoute]:  # type: ignore[type-arg]
        for route in routes:
            inner = getattr(route, "original_router", None)
            if inner is not None:
                yield from walk(inner.routes)
            elif isinstance(route, APIRoute):
                yield route

    tried = 0
    for route in walk(build(None).routes):  # type: ignore[arg-type]
        path = route.path if route.path.startswith("/api") else f"/api/v1{route.path}"
        if path in open_to_all or route.path == "/{path:path}" or route.path.startswith("/v1"):  # test_tenancy.py's
            continue
        for method in route.methods:
            tried += 1
            reply = httpx.request(
                method, f"{service.url}/tinker{path.replace('{', '').replace('}', '')}", content=b"{}", timeout=60
            )
            assert reply.status_code == 401, path
    assert tried > 25
