"""Training routes: models, gradients, optimizer steps, checkpoints.

An operation that cannot be decoded takes its turn as an :class:`InvalidOperation`: its result is the error, and the
model's later operations run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from google.protobuf.message import DecodeError

from rookery.controller.sessions.operations import AnyOperation, CreateModel, InvalidOperation, LoadState
from rookery.errors import UserError
from rookery.server.auth import Owner, Service
from rookery.server.bodies import off_loop
from rookery.server.responses import json_response
from rookery.server.tinker import decode, schemas
from rookery.server.tinker.protobuf import OLDEST, PROTOBUF, SUPPORTED, load
from rookery.storage.models import TenantRow
from rookery.tokenization.registry import model_folder, resolve

routes = APIRouter()

LOCAL = ("127.0.0.1", "::1", "localhost", "testclient")


@routes.post("/create_model")
async def create_model(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.read(schemas.CreateModelRequest, request)
    decode.check_optimizer(body.optimizer_config)
    lora = body.lora_config
    if lora is None:
        raise UserError("lora_config: only LoRA training is supported")
    if not (lora.train_attn or lora.train_mlp):
        raise UserError("lora_config: adapters of the unembedding alone are not supported; train_attn or train_mlp")
    operation = CreateModel(seed=None if lora.seed is None else lora.seed % 2**63)
    return await _create(service, owner, body.session_id, body.model_seq_id, operation, body, lora.model_dump())


@routes.post("/get_info")
async def get_info(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.read(schemas.GetInfo, request)
    row, policy = await service.controller.context.store.get_model(owner.id, body.model_id)
    local = request.client is not None and request.client.host in LOCAL
    tokenizer = _tokenizer(service, row.base_model, local=local)
    return json_response({
        "type": "get_info",
        "model_data": {"arch": "lora", "model_name": row.asked_model, "tokenizer_id": tokenizer},
        "model_id": row.id,
        "is_lora": True,
        "lora_rank": policy.rank,
        "model_name": row.asked_model,
    })  # fmt: skip


def _tokenizer(service: Service, base_model: str, *, local: bool) -> str:
    """The name or folder from which a client loads its tokenizer: the prepared folder if the client runs on this
    machine, else the hub's name."""
    model = resolve(base_model)
    if not local and model.kind in ("catalogue", "hub"):
        return model.sources[0].where
    return str(model_folder(service.settings.cache, base_model))


@routes.post("/forward_backward")
async def forward_backward(service: Service, owner: Owner, request: Request) -> Response:
    compressed = request.headers.get("content-encoding", "identity") != "identity"
    if request.headers.get("content-type") != PROTOBUF or compressed:
        raise UserError(f"forward_backward takes {PROTOBUF}, not compressed, as SDK {OLDEST} and later send it")
    schema = load()
    message, body = schema.ForwardBackwardRequest(), await request.body()
    try:
        await off_loop(service.parsing, len(body), lambda: message.ParseFromString(body))
    except DecodeError:
        raise UserError(f"the body is no ForwardBackwardRequest of SDK {SUPPORTED}") from None
    make = partial(decode.forward_backward, schema, message)
    gradient = not message.forward_only
    return await _submit(service, owner, message.model_id, message.seq_id or None, make, gradient=gradient)


@routes.post("/optim_step")
async def optim_step(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.read(schemas.OptimStepRequest, request)
    return await _submit(service, owner, body.model_id, body.seq_id, partial(decode.optim_step, body))


@routes.post("/save_weights")
async def save_weights(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.read(schemas.SaveWeights, request)
    return await _submit(service, owner, body.model_id, body.seq_id, partial(decode.save_weights, body))


@routes.post("/save_weights_for_sampler")
async def save_weights_for_sampler(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.read(schemas.SaveWeightsForSampler, request)
    return await _submit(service, owner, body.model_id, body.seq_id, partial(decode.save_weights_for_sampler, body))


@routes.post("/save_weights_external")
async def save_weights_external(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.read(schemas.SaveWeightsExternal, request)
    return await _submit(service, owner, body.model_id, body.seq_id, partial(decode.save_weights_external, body))


@routes.post("/load_weights")
async def load_weights(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.read(schemas.LoadWeights, request)
    if body.model_id is not None:
        return await _submit(service, owner, body.model_id, body.seq_id, partial(decode.load_weights, body))
    if body.session_id is None or body.model_seq_id is None:
        raise UserError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
    return await _create(service, owner, body.session_id, body.model_seq_id, decode.load_weights(body), body, {})


async def _create(
    service: Service,
    owner: TenantRow,
    session: str,
    number: int,
    operation: CreateModel | LoadState,
    body: schemas.CreateModelRequest | schemas.LoadWeights,
    lora: dict[str, Any],
) -> Response:
    about = body.user_metadata or {}
    return _accepted(
        await service.controller.sessions.create_run(
            owner.id, session, number, operation, base_model=body.base_model, lora=lora, about=about
        )
    )


async def _submit(
    service: Service,
    owner: TenantRow,
    model: str,
    seq: int | None,
    make: Callable[[], AnyOperation],
    *,
    gradient: bool = False,
) -> Response:
    operation: AnyOperation
    try:
        operation = await asyncio.to_thread(make)
    except (UserError, ValueError) as error:
        operation = InvalidOperation(error=" ".join(str(error).split()), gradient=gradient)
    return _accepted(await service.controller.sessions.submit(owner.id, model, seq, operation), model)


def _accepted(request: str, model: str | None = None) -> Response:
    return json_response({"request_id": request, "model_id": model})
