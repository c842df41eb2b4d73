"""Outcomes as the client reads them: protobuf for what is large, JSON for the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np

from rookery.controller.sessions import operations
from rookery.controller.sessions.completion_stream import Completion
from rookery.controller.sessions.futures import PendingOperations

NO_TOKEN = (0, -99999.0)
"""Fills an empty top-k slot."""

REDUCED = {"tokens": "tokens:sum", "seconds": "seconds:sum", "nonfinite": "nonfinite:sum"}
"""Our names of figures that do not say how they are summed up over chunks; the client needs it in the name."""


def waiting(request: str, why: PendingOperations) -> dict[str, Any]:
    return {
        "type": "try_again",
        "request_id": request,
        "queue_state": "paused_capacity" if why.paused else "active",
        "queue_state_reason": why.reason or None,
    }


def completion(ended: Completion) -> dict[str, Any]:
    if ended.failed:
        return {"state": "failed", "request_id": ended.request}
    return {"state": "finished", "request_id": ended.request, "response_payload_uncompressed_size": ended.size}


def plain(outcome: operations.AnyOutcome) -> dict[str, Any] | None:
    """JSON; None for what is protobuf."""
    match outcome:
        case operations.OperationFailed():
            return {"error": outcome.error, "category": outcome.category}
        case operations.ModelCreated():
            return {"type": "create_model", "model_id": outcome.model}
        case operations.OptimStepResult():
            return {"metrics": {name: value for name, value in outcome.metrics.items() if math.isfinite(value)}}
        case operations.StateSaved():
            return {"path": outcome.path, "size_bytes": outcome.size}
        case operations.SamplerSaved():
            return {"type": "save_weights_for_sampler", "sampling_session_id": outcome.sampler}
        case operations.StateLoaded():
            return {"type": "load_weights", "path": outcome.path, "model_id": outcome.model}
    return None


def binary(schema: Any, outcome: operations.AnyOutcome) -> bytes:
    """Protobuf."""
    if isinstance(outcome, operations.ForwardBackwardResult):
        return _computed(schema, outcome)
    assert isinstance(outcome, operations.SampleResult)
    return _answered(schema, outcome)


def _computed(schema: Any, outcome: operations.ForwardBackwardResult) -> bytes:
    message = schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in _metrics(outcome.metrics).items():
        message.metrics[name] = value
    values, at = np.frombuffer(outcome.logprobs, "<f4"), 0
    for trailing, group in groupby(enumerate(outcome.shapes), key=lambda item: item[1][1:]):
        arrays = []
        for number, shape in group:
            cells = outcome.cells.get(number)
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


def _answered(schema: Any, outcome: operations.SampleResult) -> bytes:
    message = schema.SampleResponse()
    for text in outcome.texts:
        message.sequences.add(
            stop_reason=schema.STOP_REASON_STOP if text.finish == "stop" else schema.STOP_REASON_LENGTH,
            tokens=np.array(text.tokens, "<i4").tobytes(),
            logprobs=np.array(text.logprobs, "<f4").tobytes(),
        )
    if outcome.prompt_logprobs is not None:
        message.prompt_logprobs = np.array(outcome.prompt_logprobs, "<f4").tobytes()
    if outcome.topk is not None:
        width = max(map(len, outcome.topk), default=0)
        padded = [[*row, *[NO_TOKEN] * (width - len(row))] for row in outcome.topk]
        message.topk_prompt_logprobs.token_ids = np.array([[t for t, _ in row] for row in padded], "<i4").tobytes()
        message.topk_prompt_logprobs.logprobs = np.array([[p for _, p in row] for row in padded], "<f4").tobytes()
        message.topk_prompt_logprobs.length, message.topk_prompt_logprobs.k = len(padded), width
    content: bytes = message.SerializeToString()
    return content
