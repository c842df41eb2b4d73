"""Training data from the wire: protobuf in, the controller's calls out.

* A datum's rows are its input tokens; row i predicts ``target_tokens[i]``, whatever that is.
* What cannot be carried out as it was sent is refused with a message that names the field; nothing is guessed, left out
  or taken for something similar.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rookery import protocol
from rookery.controller.sessions import operations
from rookery.errors import UserError
from rookery.spec.job import LOSS_PARAMETERS

RATIO = ("target_tokens", "logprobs", "advantages")

INPUTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cross_entropy": (("target_tokens",), ("weights",)),
    "importance_sampling": (RATIO, ()),
    "ppo": (RATIO, ()),
    "cispo": (RATIO, ()),
    "dro": (RATIO, ()),
    "gspo": ((*RATIO, "sequence_ratio_mask"), ()),
}
"""What each loss needs of a datum, and what it takes beside."""


@dataclass(frozen=True)
class Tensor:
    """Values in C order. ``cells``: their places in the flattened shape where the tensor is sparse."""

    values: np.ndarray
    shape: tuple[int, ...]
    cells: np.ndarray | None = None

    def dense(self) -> np.ndarray:
        if self.cells is None:
            return self.values
        full = np.zeros(math.prod(self.shape), self.values.dtype)
        full[self.cells] = self.values
        return full


def decode(schema: Any, message: Any) -> operations.ForwardBackward:
    """A ForwardBackwardRequest. Raises :class:`UserError`."""
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
    return operations.ForwardBackward(
        batch=protocol.encode(protocol.TrainingBatch(data=data)),
        shapes=shapes,
        loss=protocol.Loss(name=name, params=_parameters(message)),
        forward_only=message.forward_only,
        cells=cells,
    )


def _parameters(message: Any) -> dict[str, float]:
    """The loss's parameters, with the defaults where the client says nothing."""
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
            raise UserError(f"loss_fn_config.{key}: {number} is no number to compute with")
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
    """Which cells are meant where targets are sparse: those that are listed, in them or in the weights (a target with
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
