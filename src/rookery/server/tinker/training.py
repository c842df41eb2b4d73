"""Training: models, gradients, steps, checkpoints; and results, which are asked for one by one.

A call that is not as it should be takes its turn as a refused one: its result says why, and later calls go on."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from google.protobuf.message import DecodeError

from rookery import protocol
from rookery.controller.sessions import operations
from rookery.controller.sessions.futures import PendingOperations
from rookery.errors import RookeryError, UserError
from rookery.server.auth import Owner, Service
from rookery.server.responses import json_response
from rookery.server.tinker import decode, encode, schemas
from rookery.server.tinker.protobuf import OLDEST, SUPPORTED, load
from rookery.storage.rows import TenantRow
from rookery.tokenization.registry import model_folder, resolve

log = logging.getLogger("rookery.server.tinker")

routes = APIRouter()

PROTOBUF = "application/x-protobuf"
LOCAL = ("127.0.0.1", "::1", "localhost", "testclient")

ATTENTION, MLP = ["q", "k", "v", "o"], ["gate", "up", "down"]

TTL_SECONDS = (3600, 10 * 365 * 86400)
"""What a checkpoint may live, as the protocol states it."""

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,199}")


@routes.post("/create_model")
async def create_model(service: Service, owner: Owner, request: Request) -> Response:
    asked = schemas.read(schemas.CreateModel, await request.body())
    _adam_only(asked.optimizer_config)
    lora = asked.lora_config
    if lora is None:
        raise UserError("lora_config: only LoRA training is supported")
    targets = ATTENTION * lora.train_attn + MLP * lora.train_mlp
    if not targets:
        raise UserError("lora_config: adapters of the unembedding alone are not supported; train_attn or train_mlp")
    id = await service.controller.sessions.create_model(
        owner.id,
        asked.session_id,
        asked.model_seq_id,
        base_model=asked.base_model,
        rank=lora.rank,
        targets=targets,
        seed=None if lora.seed is None else lora.seed % 2**63,
        lora=lora.model_dump(),
        about=asked.user_metadata or {},
    )
    return _promised(id)


@routes.post("/get_info")
async def get_info(service: Service, owner: Owner, request: Request) -> Response:
    asked = schemas.read(schemas.ModelOnly, await request.body())
    row, policy = await service.controller.sessions.info(owner.id, asked.model_id)
    host = request.client.host if request.client is not None else ""
    return json_response({
        "type": "get_info",
        "model_data": {
            "arch": "lora",
            "model_name": row.asked_model,
            "tokenizer_id": _tokenizer(service, row.base_model, local=host in LOCAL),
        },
        "model_id": row.id,
        "is_lora": True,
        "lora_rank": policy.rank,
        "model_name": row.asked_model,
    })  # fmt: skip


def _tokenizer(service: Service, base_model: str, *, local: bool) -> str:
    """What a client loads its tokenizer from: the prepared folder where it can reach that, else the hub."""
    model = resolve(base_model)
    if not local and model.kind in ("catalogue", "hub"):
        return model.sources[0].where
    return str(model_folder(service.settings.cache, base_model))


@routes.post("/forward_backward")
async def forward_backward(service: Service, owner: Owner, request: Request) -> Response:
    plain = request.headers.get("content-encoding", "identity") == "identity"
    if request.headers.get("content-type") != PROTOBUF or not plain:
        raise UserError(f"forward_backward takes {PROTOBUF}, not compressed, as SDK {OLDEST} and later send it")
    schema = load()
    message = schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(await request.body())
    except DecodeError:
        raise UserError(f"the body is no ForwardBackwardRequest of SDK {SUPPORTED}") from None

    def made() -> operations.AnyCall:
        return decode.decode(schema, message)

    gradient = not message.forward_only
    return await _called(service, owner, message.model_id, message.seq_id or None, made, gradient=gradient)


@routes.post("/optim_step")
async def optim_step(service: Service, owner: Owner, request: Request) -> Response:
    asked = schemas.read(schemas.OptimStep, await request.body())

    def made() -> operations.AnyCall:
        if asked.optimizer_params is not None:
            _adam_only(asked.optimizer_params)
        adam = schemas.AdamParams.model_validate(asked.adam_params or {})
        return operations.OptimStep(
            adam=protocol.Adam(
                lr=adam.learning_rate,
                beta1=adam.beta1,
                beta2=adam.beta2,
                eps=adam.eps,
                weight_decay=adam.weight_decay,
                clip=adam.grad_clip_norm,
            )
        )

    return await _called(service, owner, asked.model_id, asked.seq_id, made)


@routes.post("/save_weights")
async def save_weights(service: Service, owner: Owner, request: Request) -> Response:
    asked = schemas.read(schemas.SaveWeights, await request.body())

    def made() -> operations.AnyCall:
        return operations.SaveState(
            kind="weights",
            name=_name(asked.path),
            ttl=check_ttl(asked.ttl_seconds),
            overwrite=asked.overwrite,
            about=asked.user_metadata or {},
        )

    return await _called(service, owner, asked.model_id, asked.seq_id, made)


@routes.post("/save_weights_for_sampler")
async def save_for_sampler(service: Service, owner: Owner, request: Request) -> Response:
    asked = schemas.read(schemas.SaveForSampler, await request.body())
    row, _ = await service.controller.sessions.info(owner.id, asked.model_id)

    def made() -> operations.AnyCall:
        if asked.path is not None:
            return operations.SaveState(
                kind="sampler_weights",
                name=_name(asked.path),
                ttl=check_ttl(asked.ttl_seconds),
                about=asked.user_metadata or {},
            )
        if asked.sampling_session_seq_id is None:
            raise UserError("save_weights_for_sampler needs a path or a sampling_session_seq_id")
        sampler = f"{row.session}:sample:{asked.sampling_session_seq_id}"
        return operations.SaveSampler(sampler=sampler, inflight=asked.kind == "inflight")

    return await _called(service, owner, asked.model_id, asked.seq_id, made)


@routes.post("/save_weights_external")
async def save_external(service: Service, owner: Owner, request: Request) -> Response:
    asked = schemas.read(schemas.SaveExternal, await request.body())

    def made() -> operations.AnyCall:
        if asked.age_encryption_recipients:
            raise UserError("age_encryption_recipients: encrypted exports are not supported")
        return operations.SaveState(kind="external_weights", name=_name(asked.path), ttl=check_ttl(asked.ttl_seconds))

    return await _called(service, owner, asked.model_id, asked.seq_id, made)


@routes.post("/load_weights")
async def load_weights(service: Service, owner: Owner, request: Request) -> Response:
    asked = schemas.read(schemas.LoadWeights, await request.body())
    call = operations.LoadState(path=asked.path, optimizer=asked.optimizer)
    if asked.model_id is None:
        if asked.session_id is None or asked.model_seq_id is None:
            raise UserError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
        _loadable(asked)
        id = await service.controller.sessions.create_from(
            owner.id,
            asked.session_id,
            asked.model_seq_id,
            call,
            base_model=asked.base_model,
            about=asked.user_metadata or {},
        )
        return _promised(id)

    def made() -> operations.AnyCall:
        _loadable(asked)
        return call

    return await _called(service, owner, asked.model_id, asked.seq_id, made)


@routes.post("/retrieve_future")
async def retrieve_future(service: Service, owner: Owner, request: Request) -> Response:
    """The result the moment it is there; held for less than the client's 45 seconds. The client would meet a 5xx with
    the same question at once, without end: here trouble that may pass is one more wait, any other is the result."""
    asked = schemas.read(schemas.Retrieve, await request.body())
    try:
        outcome = await _open_to_the_end(service, service.controller.sessions.wait(owner.id, asked.request_id))
        if outcome is None:
            outcome = PendingOperations(reason="the service stops; its next start goes on")
        if isinstance(outcome, PendingOperations):
            return json_response(encode.waiting(asked.request_id, outcome))
        if (content := encode.plain(outcome)) is not None:
            return json_response(content)
        return Response(await asyncio.to_thread(encode.binary, load(), outcome), media_type=PROTOBUF)
    except RookeryError as error:
        if error.status < 500:
            raise
        log.warning("result of %s: %s", asked.request_id, error)
        await service.clock.sleep(service.settings.worker.heartbeat_seconds)
        return json_response(encode.waiting(asked.request_id, PendingOperations(reason=str(error))))
    except Exception as error:
        log.exception("result of %s", asked.request_id)
        told = operations.OperationFailed(
            error=f"internal error ({type(error).__name__}); the log has it", category="server"
        )
        return json_response(encode.plain(told))


@routes.post("/retrieve_futures")
async def retrieve_futures(service: Service, owner: Owner, request: Request) -> Response:
    """Which of a sampler's requests have ended since the last such question; held like the question for one."""
    asked = schemas.read(schemas.RetrieveMany, await request.body())
    target = asked.target
    found = await _open_to_the_end(service, service.controller.sessions.ended(
        owner.id, target.sampling_session_id, target.cloned_sampler_id, asked.prev_cursor, asked.timeout,
        asked.retrieved_request_ids,
    ))  # fmt: skip
    completions, cursor = ([], asked.prev_cursor) if found is None else found
    return json_response({"completions": [encode.completion(one) for one in completions], "cursor": cursor})


# --- parts of them --------------------------------------------------------------------------------------------------


async def _open_to_the_end(service: Service, waited: Coroutine[Any, Any, T]) -> T | None:
    """What ``waited`` comes to; None if the service stops before."""
    waiting = asyncio.ensure_future(waited)
    closing = asyncio.ensure_future(service.closing.wait())
    try:
        await asyncio.wait({waiting, closing}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        waiting.cancel()
        closing.cancel()


async def _called(
    service: Service,
    owner: TenantRow,
    model: str,
    seq: int | None,
    made: Callable[[], operations.AnyCall],
    *,
    gradient: bool = False,
) -> Response:
    call: operations.AnyCall
    try:
        call = await asyncio.to_thread(made)
    except (UserError, ValueError) as error:
        call = operations.InvalidOperation(error=" ".join(str(error).split()), gradient=gradient)
    return _promised(await service.controller.sessions.call(owner.id, model, seq, call), model)


def _promised(request: str, model: str | None = None, **more: Any) -> Response:
    return json_response({"request_id": request, "model_id": model, **more})


def _adam_only(optimizer: schemas.Optimizer) -> None:
    if optimizer.type != "adamw":
        raise UserError(f"optimizer {optimizer.type!r} is not supported; use Adam (AdamParams)")


def _loadable(asked: schemas.LoadWeights) -> None:
    if asked.optimizer_config is not None:
        _adam_only(asked.optimizer_config)
    if asked.weights_access_token is not None:
        raise UserError("weights_access_token: weights of other accounts cannot be read")


def _name(name: str | None) -> str:
    if name is None or not _NAME.fullmatch(name):
        raise UserError(f"path: {name!r} is no name; letters, digits, dot, dash, underscore and space, at most 200")
    return name


def check_ttl(seconds: float | None) -> float | None:
    low, high = TTL_SECONDS
    if seconds is not None and not low <= seconds <= high:
        raise UserError(f"ttl_seconds: {seconds:g} is not between {low} and {high}")
    return seconds
