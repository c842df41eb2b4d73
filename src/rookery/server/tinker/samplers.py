"""Sampling: samplers and what is sampled from them."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from rookery.controller.sessions import operations
from rookery.errors import UserError
from rookery.server.auth import Owner, Service
from rookery.server.responses import json_response
from rookery.server.tinker import schemas

routes = APIRouter()


@routes.post("/create_sampling_session")
async def create_sampler(service: Service, owner: Owner, request: Request) -> Response:
    asked = schemas.read(schemas.CreateSampler, await request.body())
    row = await service.controller.sessions.create_sampler(
        owner.id,
        asked.session_id,
        asked.sampling_session_seq_id,
        base_model=asked.base_model,
        path=asked.model_path,
    )
    return json_response({"type": "create_sampling_session", "sampling_session_id": row.id})


@routes.post("/join_sampling_session")
async def join(service: Service, owner: Owner, request: Request) -> Response:
    asked = schemas.read(schemas.SamplerOnly, await request.body())
    count = await service.controller.sessions.join(owner.id, asked.sampling_session_id)
    return json_response({"type": "join_sampling_session", "client_counter": count})


@routes.get("/samplers/{sampler}")
async def sampler(service: Service, owner: Owner, sampler: str) -> Response:
    row = await service.controller.sessions.sampler(owner.id, sampler)
    return json_response({"sampler_id": row.id, "base_model": row.asked_model, "model_path": row.path or None})


@routes.post("/asample")
async def asample(service: Service, owner: Owner, request: Request) -> Response:
    asked = schemas.read(schemas.Sample, await request.body())
    if asked.sampling_session_id is None or asked.seq_id is None:
        raise UserError("asample needs sampling_session_id and seq_id; create a sampling session first")
    id = await service.controller.sessions.sample(owner.id, asked.seq_id, _call(asked, asked.sampling_session_id))
    return json_response(
        {"request_id": id, "sample_sequence_ids": [f"{id}:{number}" for number in range(asked.num_samples)]}
    )


@routes.post("/cancel_future")
async def cancel(service: Service, owner: Owner, request: Request) -> Response:
    asked = schemas.read(schemas.Retrieve, await request.body())
    await service.controller.sessions.cancel(owner.id, asked.request_id)
    return Response(status_code=204)


def _call(asked: schemas.Sample, sampler: str) -> operations.Sample:
    params = asked.sampling_params
    if params.top_k > 0 or params.top_p != 1.0:
        raise UserError(
            "top_k and top_p are not supported: a trainer cannot reproduce the log-probabilities of what they cut off"
        )
    if asked.topk_sample_logprobs:
        raise UserError("topk_sample_logprobs is not supported")
    if asked.base_model is not None or asked.model_path is not None:
        raise UserError("give the model when you create the sampling session")
    prompt: list[int] = []
    for chunk in asked.prompt.chunks:
        if chunk.tokens is None:
            raise UserError("prompt: chunks hold tokens; images and audio are not supported")
        prompt += chunk.tokens
    if not prompt:
        raise UserError("prompt: it needs at least one token")
    scored = asked.prompt_logprobs or False
    if asked.prompt_logprobs_last_n is not None and not 1 <= asked.prompt_logprobs_last_n < len(prompt):
        raise UserError(f"prompt_logprobs_last_n: the prompt has {len(prompt)} tokens")
    stop, tokens = _stops(params.stop)
    return operations.Sample(
        sampler=sampler,
        prompt=prompt,
        count=asked.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        seed=params.seed,
        stop=stop,
        stop_tokens=tokens,
        prompt_logprobs=scored,
        last=asked.prompt_logprobs_last_n,
        topk=asked.topk_prompt_logprobs,
    )


def _stops(stop: str | list[str] | list[int] | None) -> tuple[list[str], list[int] | None]:
    """Stop strings, and stop tokens beside those that end the model's replies; an empty list switches all off."""
    if stop is None:
        return [], None
    if isinstance(stop, str):
        return [stop], None
    if not stop:
        return [], []
    strings = [item for item in stop if isinstance(item, str)]
    return strings, [item for item in stop if isinstance(item, int)] or None
