"""Results as the client reads them: protobuf for the large ones, JSON for the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np
from msgspec.structs import asdict

from rookery.controller.sessions.futures import CompletedRequest, QueueStatus
from rookery.controller.sessions.operations import (
    AnyResult,
    ForwardBackwardResult,
    ModelCreated,
    OptimStepResult,
    SampleResult,
    SamplerSaved,
    StateLoaded,
)

NO_TOKEN = (0, -99999.0)
"""Fills an empty top-k slot."""

REDUCED = {"tokens": "tokens:sum", "seconds": "seconds:sum", "nonfinite": "nonfinite:sum"}
"""Our metrics whose names do not say how they are reduced over chunks; the client needs that in the name."""

TYPES: dict[type, str] = {
    ModelCreated: "create_model",
    SamplerSaved: "save_weights_for_sampler",
    StateLoaded: "load_weights",
}
"""The ``type`` field of JSON results that have one."""


def try_again(request: str, status: QueueStatus) -> dict[str, Any]:
    return {
        "type": "try_again",
        "request_id": request,
        "queue_state": "paused_capacity" if status.paused else "active",
        "queue_state_reason": status.reason or None,
    }


def completion(done: CompletedRequest) -> dict[str, Any]:
    if done.failed:
        return {"state": "failed", "request_id": done.request}
    return {"state": "finished", "request_id": done.request, "response_payload_uncompressed_size": done.size}


def json_result(result: AnyResult) -> dict[str, Any] | None:
    """The JSON body; None for results that are protobuf."""
    if isinstance(result, ForwardBackwardResult | SampleResult):
        return None
    if isinstance(result, OptimStepResult):
        return {"metrics": {name: value for name, value in result.metrics.items() if math.isfinite(value)}}
    kind = TYPES.get(type(result))
    return asdict(result) if kind is None else {"type": kind, **asdict(result)}


def protobuf_result(schema: Any, result: AnyResult) -> bytes:
    """The protobuf body of a result for which :func:`json_result` is None."""
    if isinstance(result, ForwardBackwardResult):
        return _forward_backward(schema, result)
    assert isinstance(result, SampleResult)
    return _sample(schema, result)


def _forward_backward(schema: Any, result: ForwardBackwardResult) -> bytes:
    message = schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in _metrics(result.metrics).items():
        message.metrics[name] = value
    values, at = np.frombuffer(result.logprobs, "<f4"), 0
    for trailing, group in groupby(enumerate(result.shapes), key=lambda item: item[1][1:]):
        arrays = []
        for number, shape in group:
            cells = result.cells.get(number)
            size = math.prod(shape) if cells is None else len(cells)
            found, at = values[at : at + size], at + size
            if cells is not None:
                full = np.zeros(math.prod(shape), np.float32)
                full[cells] = found
                found = full
            arrays.append(found)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        batched = record.fields["logprobs"]
        batched.data = np.concatenate(arrays).astype("<f4").tobytes()
        batched.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes()
        batched.dtype = schema.DTYPE_FLOAT32
        batched.trailing_shape.extend(trailing)
    content: bytes = message.SerializeToString()
    return content


def _metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    named = {REDUCED.get(name, name): value for name, value in metrics.items()}
    return {"loss:sum": 0.0, **{name: value for name, value in named.items() if ":" in name}}


def _sample(schema: Any, result: SampleResult) -> bytes:
    message = schema.SampleResponse()
    for text in result.texts:
        message.sequences.add(
            stop_reason=schema.STOP_REASON_STOP if text.finish == "stop" else schema.STOP_REASON_LENGTH,
            tokens=np.array(text.tokens, "<i4").tobytes(),
            logprobs=np.array(text.logprobs, "<f4").tobytes(),
        )
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = np.array(result.prompt_logprobs, "<f4").tobytes()
    if result.topk is not None:
        width = max(map(len, result.topk), default=0)
        padded = [[*row, *[NO_TOKEN] * (width - len(row))] for row in result.topk]
        message.topk_prompt_logprobs.token_ids = np.array([[t for t, _ in row] for row in padded], "<i4").tobytes()
        message.topk_prompt_logprobs.logprobs = np.array([[p for _, p in row] for row in padded], "<f4").tobytes()
        message.topk_prompt_logprobs.length, message.topk_prompt_logprobs.k = len(padded), width
    content: bytes = message.SerializeToString()
    return content
