"""Routes of operations: models, gradients, optimizer steps, checkpoints, samples; and their results.

An operation on a model that cannot be decoded, or that the model cannot execute, takes its turn as an
``InvalidOperation``: its result is the error, and the model's later operations run. Only an operation whose model and
number cannot be read is refused at once, and one that its client should repeat."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from google.protobuf.message import DecodeError
from msgspec.structs import asdict

from rookery.aio import unless
from rookery.controller.sessions import operations
from rookery.controller.sessions.futures import QueueStatus
from rookery.errors import RookeryError, UserError
from rookery.server.auth import Owner, Service, ServiceContext, address_of, make_room
from rookery.server.bodies import JSON_ITEMS, off_loop
from rookery.server.responses import compression_of, json_response
from rookery.server.tinker import protobuf, schemas
from rookery.settings import Settings
from rookery.storage.repositories import sessions
from rookery.tokenization.registry import model_folder, resolve

log = logging.getLogger("rookery.server.tinker")

routes = APIRouter()

LOCAL = ("127.0.0.1", "::1", "localhost", "testclient")

TYPES: dict[type, str] = {
    operations.ModelCreated: "create_model",
    operations.SamplerSaved: "save_weights_for_sampler",
    operations.StateLoaded: "load_weights",
}
"""The ``type`` field of JSON results that have one."""

# --- models -----------------------------------------------------------------------------------------------------------


@routes.post("/create_model")
async def create_model(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.CreateModelRequest.read(request)
    schemas.check_optimizer(body.optimizer_config, "optimizer_config")
    lora = body.lora_config
    if lora is None:
        raise UserError("lora_config: only LoRA training is supported")
    if not (lora.train_attn or lora.train_mlp):
        raise UserError("lora_config: adapters of the unembedding alone are not supported; train_attn or train_mlp")
    operation = operations.CreateModel(seed=None if lora.seed is None else lora.seed % 2**63)
    return _accepted(
        await service.controller.sessions.create_run(
            owner.id, body.session_id, body.model_seq_id, operation,
            base_model=body.base_model, lora=lora.model_dump(), about=body.user_metadata or {},
        )
    )  # fmt: skip


@routes.post("/load_weights")
async def load_weights(service: Service, owner: Owner, request: Request) -> Response:
    given, size = await schemas.read_body(request)
    if isinstance(given, dict) and given.get("model_id") is not None:
        return await _submit_body(schemas.LoadWeights, service, owner, given, size)
    body = await off_loop(service.threads, size, lambda: schemas.LoadWeights.parse(given))
    if body.session_id is None or body.model_seq_id is None:
        raise UserError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
    return _accepted(
        await service.controller.sessions.create_run(
            owner.id, body.session_id, body.model_seq_id, body.operation(),
            base_model=body.base_model, lora={}, about=body.user_metadata or {},
        )
    )  # fmt: skip


@routes.post("/get_info")
async def get_info(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.GetInfo.read(request)
    row, policy = await service.context.store.read(sessions.get_model, owner.id, body.model_id)
    address = address_of(request)
    tokenizer = tokenizer_of(row.base_model, address, service.context.settings)
    return json_response({
        "type": "get_info",
        "model_data": {"arch": "lora", "model_name": row.requested_model, "tokenizer_id": tokenizer},
        "model_id": row.id,
        "is_lora": True,
        "lora_rank": policy.rank,
        "model_name": row.requested_model,
    })  # fmt: skip


def tokenizer_of(base_model: str, address: str, settings: Settings) -> str:
    """The name by which a client at ``address`` loads the tokenizer: the prepared folder, which a client on this
    machine can read, else the model's hub id, if it has one."""
    model = resolve(base_model)
    if model.kind in ("catalogue", "hub") and not (settings.server.local_tokenizers and address in LOCAL):
        return model.sources[0].where
    return str(model_folder(settings.cache, base_model))


@routes.post("/forward_backward")
async def forward_backward(service: Service, owner: Owner, request: Request) -> Response:
    if request.headers.get("content-type") != protobuf.PROTOBUF or compression_of(request):
        raise UserError(
            f"forward_backward takes {protobuf.PROTOBUF}, not compressed, as SDK {protobuf.OLDEST} and later send it"
        )
    body = await request.body()
    try:
        message = await off_loop(service.threads, len(body), lambda: protobuf.parse(body, JSON_ITEMS))
    except DecodeError:
        raise UserError(f"the body is no ForwardBackwardRequest of SDK {protobuf.SUPPORTED}") from None
    make, gradient = partial(protobuf.forward_backward, message), not message.forward_only
    return await _submit(
        service, owner.id, message.model_id, message.seq_id or None, make, gradient=gradient, size=len(body)
    )


async def _submit_json(kind: type[schemas.ModelRequest], service: Service, owner: Owner, request: Request) -> Response:
    return await _submit_body(kind, service, owner, *await schemas.read_body(request))


async def _submit_body(
    kind: type[schemas.ModelRequest | schemas.LoadWeights], service: Service, owner: Owner, body: Any, size: int
) -> Response:
    turn = await off_loop(service.threads, size, lambda: schemas.Turn.parse(body))
    make, step = (lambda: kind.parse(body).operation()), kind is schemas.OptimStepRequest
    return await _submit(service, owner.id, turn.model_id, turn.seq_id, make, step=step, size=size)


@routes.post("/optim_step")
async def optim_step(service: Service, owner: Owner, request: Request) -> Response:
    return await _submit_json(schemas.OptimStepRequest, service, owner, request)


@routes.post("/save_weights")
async def save_weights(service: Service, owner: Owner, request: Request) -> Response:
    return await _submit_json(schemas.SaveWeights, service, owner, request)


@routes.post("/save_weights_for_sampler")
async def save_weights_for_sampler(service: Service, owner: Owner, request: Request) -> Response:
    return await _submit_json(schemas.SaveWeightsForSampler, service, owner, request)


@routes.post("/save_weights_external")
async def save_weights_external(service: Service, owner: Owner, request: Request) -> Response:
    return await _submit_json(schemas.SaveWeightsExternal, service, owner, request)


async def _submit(
    service: Service,
    tenant: str,
    model: str,
    seq: int | None,
    make: Callable[[], operations.AnyOperation],
    *,
    gradient: bool = False,
    step: bool = False,
    size: int = 0,
) -> Response:
    """Queue the operation that ``make`` decodes from ``size`` bytes, or its error in the place of one that adds a
    ``gradient`` or takes a ``step``."""
    operation: operations.AnyOperation
    try:
        operation = await off_loop(service.threads, size, make)
    except (UserError, ValueError) as error:
        operation = operations.InvalidOperation(error=" ".join(str(error).split()), gradient=gradient, step=step)
    return _accepted(await service.controller.sessions.submit_in_turn(tenant, model, seq, operation), model)


def _accepted(request: str, model: str | None = None) -> Response:
    return json_response({"request_id": request, "model_id": model})


# --- samples ----------------------------------------------------------------------------------------------------------


@routes.post("/create_sampling_session")
async def create_sampler(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.CreateSamplingSession.read(request)
    row = await service.controller.sessions.create_sampler(
        owner.id, body.session_id, body.sampling_session_seq_id, base_model=body.base_model, path=body.model_path
    )
    return json_response({"type": "create_sampling_session", "sampling_session_id": row.id})


@routes.get("/samplers/{sampler}")
async def sampler(service: Service, owner: Owner, sampler: str) -> Response:
    row = await service.context.store.read(sessions.get_sampler, owner.id, sampler)
    return json_response({"sampler_id": row.id, "base_model": row.requested_model, "model_path": row.path or None})


@routes.post("/asample")
async def asample(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.AsampleRequest.read(request)
    operation = body.operation()
    assert body.seq_id is not None  # the operation needs it
    id = await service.controller.sessions.sample(owner.id, body.seq_id, operation)
    sequences = [f"{id}:{number}" for number in range(body.num_samples)]
    return json_response({"request_id": id, "sample_sequence_ids": sequences})


@routes.post("/cancel_future")
async def cancel(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.RetrieveFuture.read(request)
    await service.controller.sessions.samplers.cancel(owner.id, body.request_id)
    return Response(status_code=204)


# --- results ----------------------------------------------------------------------------------------------------------


@routes.post("/retrieve_future")
async def retrieve_future(service: Service, owner: Owner, request: Request) -> Response:
    """The result as soon as it is there; the request is held for less than the client's 45 seconds. The client repeats
    a request that gets a 5xx at once and for ever, so a passing error is answered as one more wait, and any other error
    as the result."""
    body = await schemas.RetrieveFuture.read(request)
    try:
        waiting = service.controller.sessions.wait(owner.id, body.request_id)
        result = await unless(service.closing.wait(), waiting)
        if result is None:
            result = QueueStatus(reason="the service stops; it resumes at its next start")
        return await _result(service, request, body.request_id, result)
    except RookeryError as error:
        if error.status < 500:
            raise
        log.warning("result of %s: %s", body.request_id, error)
        await service.context.clock.sleep(service.context.settings.worker.heartbeat_seconds)
        return await _result(service, request, body.request_id, QueueStatus(reason=str(error)))
    except Exception as error:
        log.exception("result of %s", body.request_id)
        failed = f"internal error ({type(error).__name__}); the log has it"
        return await _result(
            service, request, body.request_id, operations.OperationFailed(error=failed, category="server")
        )


async def _result(
    service: ServiceContext, request: Request, id: str, result: operations.AnyResult | QueueStatus
) -> Response:
    """The result of the operation ``id`` as the client reads it: protobuf for the large ones, JSON for the others."""
    content: dict[str, Any]
    match result:
        case operations.ForwardBackwardResult() | operations.SampleResult():
            await make_room(service, request, protobuf.size_of(result))
            return Response(await service.encoders(protobuf.encode, result), media_type=protobuf.PROTOBUF)
        case QueueStatus():
            state = "paused_capacity" if result.paused else "active"
            content = {"type": "try_again", "request_id": id, "queue_state": state}
            content["queue_state_reason"] = result.reason or None
        case operations.OptimStepResult():
            content = {"metrics": {name: value for name, value in result.metrics.items() if math.isfinite(value)}}
        case _:
            kind = TYPES.get(type(result))
            content = asdict(result) if kind is None else {"type": kind, **asdict(result)}
    return json_response(content)
