"""Requests to operations: protobuf and JSON in, :mod:`rookery.controller.sessions.operations` out.

* A datum's rows are its input tokens; row i predicts ``target_tokens[i]``, whatever token that is.
* A request that cannot be executed as it was sent is refused with an error that names the field. Nothing is guessed,
  ignored or replaced by something similar.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from rookery import protocol
from rookery.controller.sessions.operations import (
    ForwardBackwardOperation,
    LoadState,
    OptimStepOperation,
    Sample,
    SaveSampler,
    SaveState,
)
from rookery.errors import UserError
from rookery.server.tinker import schemas
from rookery.spec.job import LOSS_PARAMETERS
from rookery.storage.models import CheckpointKind

RATIO = ("target_tokens", "logprobs", "advantages")

INPUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cross_entropy": (("target_tokens",), ("weights",)),
    "importance_sampling": (RATIO, ()),
    "ppo": (RATIO, ()),
    "cispo": (RATIO, ()),
    "dro": (RATIO, ()),
    "gspo": ((*RATIO, "sequence_ratio_mask"), ()),
}
"""By loss: the tensors that a datum must have, and those that it may have."""

TTL_SECONDS = (3600, 10 * 365 * 86400)
"""The shortest and the longest lifetime of a checkpoint that the protocol allows."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,199}")


def optim_step(request: schemas.OptimStepRequest) -> OptimStepOperation:
    check_optimizer(request.optimizer_params)
    adam = schemas.AdamParams.model_validate(request.adam_params or {})
    return OptimStepOperation(
        adam=protocol.Adam(
            lr=adam.learning_rate, beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps, weight_decay=adam.weight_decay,
            clip=adam.grad_clip_norm,
        )
    )  # fmt: skip


def save_weights(request: schemas.SaveWeights) -> SaveState:
    return _save("weights", request.path, request.ttl_seconds, request.user_metadata, request.overwrite)


def save_weights_external(request: schemas.SaveWeightsExternal) -> SaveState:
    if request.age_encryption_recipients:
        raise UserError("age_encryption_recipients: encrypted exports are not supported")
    return _save("external_weights", request.path, request.ttl_seconds)


def save_weights_for_sampler(request: schemas.SaveWeightsForSampler) -> SaveState | SaveSampler:
    if request.path is not None:
        return _save("sampler_weights", request.path, request.ttl_seconds, request.user_metadata)
    if request.sampling_session_seq_id is None:
        raise UserError("save_weights_for_sampler needs a path or a sampling_session_seq_id")
    session = request.model_id.rpartition(":train:")[0]
    return SaveSampler(
        sampler=f"{session}:sample:{request.sampling_session_seq_id}", inflight=request.kind == "inflight"
    )


def load_weights(request: schemas.LoadWeights) -> LoadState:
    check_optimizer(request.optimizer_config)
    if request.weights_access_token is not None:
        raise UserError("weights_access_token: weights of other accounts cannot be read")
    return LoadState(path=request.path, optimizer=request.optimizer)


def check_optimizer(optimizer: schemas.OptimizerConfig | None) -> None:
    """Raises :class:`UserError` for an optimizer other than Adam."""
    if optimizer is not None and optimizer.type != "adamw":
        raise UserError(f"optimizer {optimizer.type!r} is not supported; use Adam (AdamParams)")


def check_ttl(seconds: float | None) -> float | None:
    low, high = TTL_SECONDS
    if seconds is not None and not low <= seconds <= high:
        raise UserError(f"ttl_seconds: {seconds:g} is not between {low} and {high}")
    return seconds


def _save(
    kind: CheckpointKind,
    name: str | None,
    ttl: float | None,
    about: dict[str, str] | None = None,
    overwrite: bool = False,
) -> SaveState:
    if name is None or not _NAME.fullmatch(name):
        raise UserError(f"path: {name!r} is no name; letters, digits, dot, dash, underscore and space, at most 200")
    return SaveState(kind=kind, name=name, ttl=check_ttl(ttl), overwrite=overwrite, about=about or {})


def sample(request: schemas.AsampleRequest, sampler: str) -> Sample:
    params, last = request.sampling_params, request.prompt_logprobs_last_n
    if params.top_k > 0 or params.top_p != 1.0:
        raise UserError(
            "top_k and top_p are not supported: a trainer cannot reproduce the log-probabilities of what they cut off"
        )
    if request.topk_sample_logprobs:
        raise UserError("topk_sample_logprobs is not supported")
    if request.base_model is not None or request.model_path is not None:
        raise UserError("give the model when you create the sampling session")
    prompt: list[int] = []
    for chunk in request.prompt.chunks:
        if chunk.tokens is None:
            raise UserError("prompt: chunks hold tokens; images and audio are not supported")
        prompt += chunk.tokens
    if not prompt:
        raise UserError("prompt: it needs at least one token")
    if last is not None and not 1 <= last < len(prompt):
        raise UserError(f"prompt_logprobs_last_n: the prompt has {len(prompt)} tokens")
    stop, stop_tokens = _stops(params.stop)
    return Sample(
        sampler=sampler, prompt=prompt, count=request.num_samples, max_tokens=params.max_tokens,
        temperature=params.temperature, seed=params.seed, stop=stop, stop_tokens=stop_tokens,
        prompt_logprobs=request.prompt_logprobs or False, last=last, topk=request.topk_prompt_logprobs,
    )  # fmt: skip


def _stops(stop: str | list[str] | list[int] | None) -> tuple[list[str], list[int] | None]:
    """Stop strings, and stop tokens in place of those that end the model's replies; an empty list disables all."""
    if stop is None:
        return [], None
    if isinstance(stop, str):
        return [stop], None
    if not stop:
        return [], []
    strings = [item for item in stop if isinstance(item, str)]
    return strings, [item for item in stop if isinstance(item, int)] or None


@dataclass(frozen=True)
class Tensor:
    """Values in C order. ``cells``: where the tensor is sparse, their indices in the flattened shape."""

    values: np.ndarray
    shape: tuple[int, ...]
    cells: np.ndarray | None = None

    def dense(self) -> np.ndarray:
        if self.cells is None:
            return self.values
        full = np.zeros(math.prod(self.shape), self.values.dtype)
        full[self.cells] = self.values
        return full


def forward_backward(schema: Any, message: Any) -> ForwardBackwardOperation:
    """A protobuf ``ForwardBackwardRequest`` of ``schema``. Raises :class:`UserError`."""
    name = message.loss_fn
    if name not in INPUTS:
        hint = "; stable_reinforce is not published, use ppo, cispo or gspo" if name == "stable_reinforce" else ""
        raise UserError(f"loss_fn {name!r} is not supported; there are {', '.join(INPUTS)}{hint}")
    if not message.data:
        raise UserError("forward_backward needs at least one datum")
    data, shapes, cells = [], [], {}
    for number, datum in enumerate(message.data):
        try:
            found, shape, places = _datum(schema, datum, name)
        except (UserError, ValueError) as error:
            raise UserError(f"data[{number}]: {error}") from None
        data.append(found)
        shapes.append(list(shape))
        if places is not None:
            cells[number] = places.tolist()
    return ForwardBackwardOperation(
        batch=protocol.encode(protocol.TrainingBatch(data=data)),
        shapes=shapes,
        loss=protocol.Loss(name=name, params=_parameters(message)),
        forward_only=message.forward_only,
        cells=cells,
    )


def _parameters(message: Any) -> dict[str, float]:
    """The loss's parameters, with defaults for those that the client did not set."""
    given: dict[str, float] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise UserError(f"loss_fn_config.{key}: text is not supported")
        given[key] = value.number
    known = LOSS_PARAMETERS[message.loss_fn]
    for key, number in given.items():
        if key not in known:
            raise UserError(
                f"loss_fn_config.{key}: {message.loss_fn} has no such parameter; it has {', '.join(known) or 'none'}"
            )
        if not math.isfinite(number):
            raise UserError(f"loss_fn_config.{key}: {number} is not finite")
    return {**known, **given}


def _datum(schema: Any, datum: Any, loss: str) -> tuple[protocol.Datum, tuple[int, ...], np.ndarray | None]:
    tokens = _tokens(datum.model_input)
    needed, optional = INPUTS[loss]
    inputs = {name: _tensor(schema, tensor) for name, tensor in datum.loss_fn_inputs.items()}
    if missing := [name for name in needed if name not in inputs]:
        raise UserError(f"{loss} needs loss_fn_inputs {', '.join(missing)}")
    if unknown := sorted(inputs.keys() - {*needed, *optional}):
        raise UserError(f"{loss} takes no loss_fn_inputs {', '.join(unknown)}; it takes {', '.join(needed + optional)}")
    targets = inputs["target_tokens"]
    if targets.values.dtype.kind != "i":
        raise UserError("target_tokens are integers")
    if len(targets.shape) not in ((1, 2) if loss == "cross_entropy" else (1,)) or targets.shape[0] != len(tokens):
        raise UserError(f"target_tokens have shape {list(targets.shape)}, model_input has {len(tokens)} tokens")
    for name, tensor in inputs.items():
        if tensor.shape != targets.shape:
            raise UserError(f"{name} have shape {list(tensor.shape)}, target_tokens {list(targets.shape)}")
    count = math.prod(targets.shape)
    zeros, ones = np.zeros(count, np.float32), np.ones(count, np.float32)
    weights = inputs["weights"].dense() if "weights" in inputs else ones
    cells = _cells(targets, inputs.get("weights"))
    if loss == "gspo":
        weights = (inputs["sequence_ratio_mask"].dense() != 0).astype(np.float32)
        if np.any((weights == 0) & (inputs["advantages"].dense() != 0)):
            raise UserError("advantages outside of the sequence_ratio_mask are not supported: make them 0")
    flat: dict[str, np.ndarray] = {
        "targets": targets.dense(),
        "logprobs": inputs["logprobs"].dense() if "logprobs" in inputs else zeros,
        "advantages": inputs["advantages"].dense() if "advantages" in inputs else zeros,
        "weights": weights,
    }
    rows = np.repeat(np.arange(len(tokens)), count // max(1, len(tokens)))
    if cells is not None:
        rows, flat = rows[cells], {name: values[cells] for name, values in flat.items()}
    lists: dict[str, Any] = {name: values.tolist() for name, values in flat.items()}
    found = protocol.Datum(tokens=tokens, rows=rows.tolist(), **lists)
    return found, targets.shape, cells


def _cells(targets: Tensor, weights: Tensor | None) -> np.ndarray | None:
    """The cells that are targets where they are sparse: those listed in the targets or in the weights (a target with
    id 0 looks like an unlisted one). None: all."""
    if targets.cells is None or weights is None:
        return targets.cells
    return None if weights.cells is None else np.union1d(targets.cells, weights.cells)


def _tokens(chunks: Any) -> list[int]:
    tokens: list[int] = []
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise UserError("model_input may hold text only; images and audio are not supported")
        tokens += np.frombuffer(chunk.encoded_text.tokens, "<i4").tolist()
    return tokens


def _tensor(schema: Any, message: Any) -> Tensor:
    kinds = {schema.DTYPE_FLOAT32: "<f4", schema.DTYPE_INT64: "<i8", schema.DTYPE_INT32: "<i4"}
    if message.dtype not in kinds:
        raise UserError(f"a tensor has dtype {message.dtype}, which is not supported")
    dtype, shape = kinds[message.dtype], tuple(message.shape)
    if message.WhichOneof("encoding") == "sparse_csr":
        csr = message.sparse_csr
        values = np.frombuffer(csr.values, dtype)
        crow, columns = np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8")
        whole = len(shape) == 2 and len(crow) == shape[0] + 1 and len(values) == len(columns) == crow[-1]
        if (
            not whole
            or np.any(np.diff(crow) < 0)
            or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1])
        ):
            raise UserError("a sparse tensor's indices do not fit its shape")
        return Tensor(values, shape, np.repeat(np.arange(shape[0]), np.diff(crow)) * shape[1] + columns)
    values = np.frombuffer(message.dense, dtype)
    shape = shape or (len(values),)
    if math.prod(shape) != len(values):
        raise UserError(f"a tensor of shape {list(shape)} has {len(values)} values")
    return Tensor(values, shape)
