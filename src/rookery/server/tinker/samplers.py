"""Sampling routes, and results: of operations one by one, of a sampler's requests as a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from rookery.controller.sessions.futures import QueueStatus
from rookery.controller.sessions.operations import OperationFailed
from rookery.errors import RookeryError, UserError
from rookery.server.auth import Owner, Service
from rookery.server.responses import json_response
from rookery.server.tinker import decode, encode, schemas
from rookery.server.tinker.protobuf import PROTOBUF, load

log = logging.getLogger("rookery.server.tinker")

routes = APIRouter()

T = TypeVar("T")


@routes.post("/create_sampling_session")
async def create_sampler(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.read(schemas.CreateSamplingSession, request)
    row = await service.controller.sessions.create_sampler(
        owner.id, body.session_id, body.sampling_session_seq_id, base_model=body.base_model, path=body.model_path
    )
    return json_response({"type": "create_sampling_session", "sampling_session_id": row.id})


@routes.post("/join_sampling_session")
async def join(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.read(schemas.JoinSamplingSession, request)
    count = await service.controller.context.store.join_sampler(owner.id, body.sampling_session_id)
    return json_response({"type": "join_sampling_session", "client_counter": count})


@routes.get("/samplers/{sampler}")
async def sampler(service: Service, owner: Owner, sampler: str) -> Response:
    row = await service.controller.context.store.get_sampler(owner.id, sampler)
    return json_response({"sampler_id": row.id, "base_model": row.asked_model, "model_path": row.path or None})


@routes.post("/asample")
async def asample(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.read(schemas.AsampleRequest, request)
    if body.sampling_session_id is None or body.seq_id is None:
        raise UserError("asample needs sampling_session_id and seq_id; create a sampling session first")
    operation = decode.sample(body, body.sampling_session_id)
    id = await service.controller.sessions.sample(owner.id, body.seq_id, operation)
    sequences = [f"{id}:{number}" for number in range(body.num_samples)]
    return json_response({"request_id": id, "sample_sequence_ids": sequences})


@routes.post("/cancel_future")
async def cancel(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.read(schemas.RetrieveFuture, request)
    await service.controller.sessions.samplers.cancel(owner.id, body.request_id)
    return Response(status_code=204)


@routes.post("/retrieve_future")
async def retrieve_future(service: Service, owner: Owner, request: Request) -> Response:
    """The result as soon as it is there; the request is held for less than the client's 45 seconds. The client repeats
    a request that gets a 5xx at once and for ever, so a passing error is answered as one more wait, and any other error
    as the result."""
    body = await schemas.read(schemas.RetrieveFuture, request)
    try:
        result = await _unless_closing(service, service.controller.sessions.futures.wait(owner.id, body.request_id))
        if result is None:
            result = QueueStatus(reason="the service stops; it resumes at its next start")
        if isinstance(result, QueueStatus):
            return json_response(encode.try_again(body.request_id, result))
        if (content := encode.json_result(result)) is not None:
            return json_response(content)
        return Response(await asyncio.to_thread(encode.protobuf_result, load(), result), media_type=PROTOBUF)
    except RookeryError as error:
        if error.status < 500:
            raise
        log.warning("result of %s: %s", body.request_id, error)
        await service.clock.sleep(service.settings.worker.heartbeat_seconds)
        return json_response(encode.try_again(body.request_id, QueueStatus(reason=str(error))))
    except Exception as error:
        log.exception("result of %s", body.request_id)
        failed = f"internal error ({type(error).__name__}); the log has it"
        return json_response(encode.json_result(OperationFailed(error=failed, category="server")))


@routes.post("/retrieve_futures")
async def retrieve_futures(service: Service, owner: Owner, request: Request) -> Response:
    """The sampler's requests that completed since the last such request; held like :func:`retrieve_future`."""
    body = await schemas.read(schemas.RetrieveFutures, request)
    futures, target = service.controller.sessions.futures, body.target
    futures.release(owner.id, body.retrieved_request_ids)
    poll = futures.completions.poll(
        owner.id, target.sampling_session_id, target.cloned_sampler_id, body.prev_cursor, body.timeout
    )
    completions, cursor = await _unless_closing(service, poll) or ((), body.prev_cursor)
    return json_response({"completions": [encode.completion(done) for done in completions], "cursor": cursor})


async def _unless_closing(service: Service, waiting: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``waiting``; None if the service stops before."""
    task = asyncio.ensure_future(waiting)
    closing = asyncio.ensure_future(service.closing.wait())
    try:
        await asyncio.wait({task, closing}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        closing.cancel()
