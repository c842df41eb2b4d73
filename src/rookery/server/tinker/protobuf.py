"""The protocol's protobuf messages: training data in, log-probabilities and samples out.

* A datum's rows are its input tokens; row i predicts ``target_tokens[i]``, whatever token that is.
* Only the targets that a sparse tensor lists take memory while a request is read, and no number is an object: a request
  of millions takes about ten times its size.

The schema is the module that the ``tinker`` package publishes. It is loaded from its file: importing the package itself
would load PyTorch into the service.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from rookery import protocol
from rookery.controller.sessions.operations import ForwardBackwardOperation, ForwardBackwardResult, SampleResult
from rookery.errors import UserError, count_of, installs, short
from rookery.server.bodies import INLINE_BYTES, BodyRefused
from rookery.server.response_room import LARGE_BYTES
from rookery.spec.policy import LOSS_PARAMETERS, check_parameters

PROTOBUF = "application/x-protobuf"

SUPPORTED = "0.38"
"""The newest minor version of the SDK that is tested."""

OLDEST = "0.22.3"
"""The oldest version of the SDK that is tested: older ones send data in another form."""

TARGETS = 1 << 22
"""Most targets of one request, counting those that sparse tensors leave out: its result has four bytes for each. A
body that lists them all has fewer than half as many."""

DIMENSIONS = 4
"""Most dimensions of a tensor; no loss takes more than two."""

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

NO_TOKEN = (0, -99999.0)
"""Fills an empty top-k slot."""

REDUCED = {"tokens": "tokens:sum", "seconds": "seconds:sum", "nonfinite": "nonfinite:sum"}
"""Our metrics whose names do not say how they are reduced over chunks; the client needs that in the name."""


def supported(version: str) -> bool:
    """Whether a client's version lies in the tested range."""
    newest = tuple(map(int, SUPPORTED.split(".")))
    try:
        given = tuple(map(int, version.split(".")[:3]))
    except ValueError:
        return False
    return tuple(map(int, OLDEST.split("."))) <= given and given[: len(newest)] <= newest


def older_than_supported(version: str) -> bool:
    """Whether a client's version is older than the newest tested one; not for a text that is no version."""
    numbers = re.match(r"([0-9]{1,6})\.([0-9]{1,6})", version)
    return numbers is not None and tuple(map(int, numbers.groups())) < tuple(map(int, SUPPORTED.split(".")))


@cache
def schema() -> Any:
    """The generated module. Raises :class:`ImportError` if the package is not installed."""
    package = importlib.util.find_spec("tinker")
    if package is None or package.origin is None:
        raise ImportError(f"the tinker package is not installed: {installs('tinker')}")
    path = Path(package.origin).parent / "proto" / "tinker_public_pb2.py"
    spec = importlib.util.spec_from_file_location("rookery_tinker_public_pb2", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"the installed tinker package has no {path.name}: install {SUPPORTED}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- training data ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """Values in C order. ``cells``: where the tensor is sparse, their indices in the flattened shape."""

    values: np.ndarray
    shape: tuple[int, ...]
    cells: np.ndarray | None = None

    def at(self, cells: np.ndarray | None) -> np.ndarray:
        """The values at ``cells``, which ascend (None: all), with 0 for those that a sparse tensor leaves out."""
        if self.cells is None:
            return self.values if cells is None else self.values[cells]
        found = np.zeros(math.prod(self.shape) if cells is None else len(cells), self.values.dtype)
        columns = self.cells if cells is None else np.searchsorted(cells, self.cells)
        found[columns] = self.values
        return found


def parse(body: bytes, items: int) -> Any:
    """The ``ForwardBackwardRequest`` in ``body``. Raises :class:`BodyRefused` for more than ``items`` fields, which are
    counted first: an empty message has two bytes there and 60 in memory. Raises ``DecodeError`` for anything else."""
    message = schema().ForwardBackwardRequest()
    if len(body) > INLINE_BYTES and has_more_fields(body, message.DESCRIPTOR, items):
        raise BodyRefused(413, f"the body has more than {count_of(items, 'item')}; send fewer in a request")
    message.ParseFromString(body)
    return message


def has_more_fields(body: bytes, descriptor: Any, most: int) -> bool:
    """Whether a message has more than ``most`` fields, those of the messages inside included. Reads no further than
    that. Raises ``DecodeError`` where it is no message."""
    at, end, kind, view = 0, len(body), descriptor, memoryview(body)
    around: list[tuple[int, Any]] = []
    """The ends and the kinds of the messages around the present one, which has as many bytes as it states, or ends with
    the one around it."""
    try:
        while at < end or around:
            if at >= end:
                end, kind = around.pop()
                continue
            if (most := most - 1) < 0:
                return True
            tag, at = _varint(view, at)
            match tag & 7:
                case 0:
                    _, at = _varint(view, at)
                case 1:
                    at += 8
                case 5:
                    at += 4
                case 2:
                    size, at = _varint(view, at)
                    field = kind.fields_by_number.get(tag >> 3)
                    if field is None or field.message_type is None:
                        at += size
                    elif size:
                        around.append((end, kind))
                        end, kind = min(at + size, end), field.message_type
                case 6 | 7:
                    raise DecodeError("a field of a kind that does not exist")
    except IndexError:
        raise DecodeError("it ends within a number") from None
    return False


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at ``at``, and where it ends."""
    value, shift = view[at], 7
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    while True:
        at += 1
        byte = view[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
        if shift > 63:
            raise DecodeError("a number of more than ten bytes")


def forward_backward(message: Any) -> ForwardBackwardOperation:
    """The operation that a ``ForwardBackwardRequest`` describes. Raises :class:`UserError`, also for a field that the
    schema does not have: it could change the meaning of the others."""
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        raise UserError(f"the request has fields that SDK {SUPPORTED} does not send; use that version or an older one")
    name = message.loss_fn
    if name not in INPUTS:
        hint = (
            "; stable_reinforce is not published, use importance_sampling, ppo, cispo or gspo"
            if name == "stable_reinforce"
            else ""
        )
        raise UserError(f"loss_fn {short(repr(name))} is not supported; there are {', '.join(INPUTS)}{hint}")
    if not message.data:
        raise UserError("forward_backward needs at least one datum")
    data: list[protocol.Datum] = []
    shapes: list[list[int]] = []
    cells: dict[int, protocol.Integers] = {}
    left = TARGETS
    for number, datum in enumerate(message.data):
        try:
            found, shape, listed = _datum(datum, name, left)
        except (UserError, ValueError) as error:
            raise UserError(f"data[{number}]: {error}") from None
        left -= math.prod(shape)
        data.append(found)
        shapes.append(list(shape))
        if listed is not None:
            cells[number] = listed.astype("<i4").tobytes()
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
            raise UserError(f"loss_fn_config.{short(key)}: text is not supported")
        given[key] = value.number
    known = LOSS_PARAMETERS[message.loss_fn]
    for key, number in given.items():
        if key not in known:
            raise UserError(
                f"loss_fn_config.{short(key)}: {message.loss_fn} has no such parameter;"
                f" it has {', '.join(known) or 'none'}"
            )
        if not math.isfinite(number):
            raise UserError(f"loss_fn_config.{key}: {number} is not finite")
    try:
        return check_parameters({**known, **given})
    except ValueError as error:
        raise UserError(f"loss_fn_config.{error}") from None


def _datum(datum: Any, loss: str, limit: int) -> tuple[protocol.Datum, tuple[int, ...], np.ndarray | None]:
    """The datum, the shape of its targets, and where these are sparse the cells that are targets."""
    tokens = _tokens(datum.model_input)
    length = len(protocol.integers(tokens))
    needed, optional = INPUTS[loss]
    inputs = {name: _tensor(tensor) for name, tensor in datum.loss_fn_inputs.items()}
    if missing := [name for name in needed if name not in inputs]:
        raise UserError(f"{loss} needs loss_fn_inputs {', '.join(missing)}")
    if unknown := sorted(inputs.keys() - {*needed, *optional}):
        raise UserError(
            f"{loss} takes no loss_fn_inputs {short(', '.join(unknown))}; it takes {', '.join(needed + optional)}"
        )
    targets = inputs["target_tokens"]
    shape = targets.shape
    if targets.values.dtype.kind != "i":
        raise UserError("target_tokens are integers")
    if len(shape) not in ((1, 2) if loss == "cross_entropy" else (1,)) or shape[0] != length:
        raise UserError(f"target_tokens have shape {list(shape)}, model_input has {count_of(length, 'token')}")
    for name, tensor in inputs.items():
        if tensor.shape != shape:
            raise UserError(f"{name} have shape {list(tensor.shape)}, target_tokens {list(shape)}")
    if math.prod(shape) > limit:
        raise UserError(f"target_tokens have shape {list(shape)}: a request may have {TARGETS} targets")
    cells = _cells(targets, inputs.get("weights"))
    width = math.prod(shape[1:])
    listed = width if cells is None else np.bincount(cells // max(1, width)).max(initial=0)
    if listed > protocol.ROW_TARGETS:
        raise UserError(
            f"target_tokens list {count_of(listed, 'target')} for a token, allowed: at most {protocol.ROW_TARGETS}"
        )
    found = targets.at(cells)
    wanted = found.astype("<i4")
    if (beyond := found[found != wanted]).size:
        raise UserError(f"target_tokens hold {beyond[0]}, which is no token id")
    floats = {
        name: _finite(name, inputs[name].at(cells)).tobytes()
        for name in ("logprobs", "advantages", "weights")
        if name in inputs
    }
    if loss == "gspo":
        counts = inputs["sequence_ratio_mask"].values != 0
        if np.any(~counts & (inputs["advantages"].values != 0)):
            raise UserError("advantages outside of the sequence_ratio_mask are not supported: make them 0")
        floats["weights"] = counts.astype("<f4").tobytes()
    rows = b"" if cells is None else (cells // max(1, width)).astype("<i4").tobytes()
    return protocol.Datum(tokens=tokens, rows=rows, targets=wanted.tobytes(), **floats), shape, cells


def _finite(name: str, values: np.ndarray) -> np.ndarray:
    """The values as float32. Raises :class:`UserError` for one that is not finite: a sum with it has no gradient, also
    where its factor is 0."""
    with np.errstate(over="ignore"):
        found: np.ndarray = values.astype("<f4")
    if not (finite := np.isfinite(found)).all():
        at = int(np.argmin(finite))
        raise UserError(
            f"{name} hold {values[at]} at {at}, which is no finite number of 32 bits; give 0 where no loss is"
        )
    return found


def _cells(targets: Tensor, weights: Tensor | None) -> np.ndarray | None:
    """The cells that are targets where they are sparse, ascending: those listed in the targets or in the weights (a
    target with id 0 looks like an unlisted one). None: all."""
    if targets.cells is None or weights is None:
        return None if targets.cells is None else np.unique(targets.cells)
    return None if weights.cells is None else np.union1d(targets.cells, weights.cells)


def _tokens(chunks: Any) -> bytes:
    tokens: list[bytes] = []
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise UserError("model_input may hold text only; images and audio are not supported")
        tokens.append(np.frombuffer(chunk.encoded_text.tokens, "<i4").tobytes())
    if not any(tokens):
        raise UserError("model_input needs at least one token")
    return b"".join(tokens)


def _tensor(message: Any) -> Tensor:
    kinds = {schema().DTYPE_FLOAT32: "<f4", schema().DTYPE_INT64: "<i8", schema().DTYPE_INT32: "<i4"}
    if message.dtype not in kinds:
        raise UserError(f"a tensor has dtype {message.dtype}, which is not supported")
    if len(message.shape) > DIMENSIONS:
        raise UserError(f"a tensor has {count_of(len(message.shape), 'dimension')}, allowed: at most {DIMENSIONS}")
    dtype, shape = kinds[message.dtype], tuple(message.shape)
    if any(size < 0 for size in shape):
        raise UserError(f"a tensor has shape {list(shape)}: sizes are not negative")
    if message.WhichOneof("encoding") != "sparse_csr":
        values = np.frombuffer(message.dense, dtype)
        shape = shape or (len(values),)
        if math.prod(shape) != len(values):
            raise UserError(f"a tensor of shape {list(shape)} has {count_of(len(values), 'value')}")
        return Tensor(values, shape)
    csr = message.sparse_csr
    values = np.frombuffer(csr.values, dtype)
    crow, columns = np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8")
    whole = len(shape) == 2 and len(crow) == shape[0] + 1 and len(values) == len(columns) == crow[-1] and crow[0] == 0
    if not whole or np.any(np.diff(crow) < 0) or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]):
        raise UserError("a sparse tensor's indices do not fit its shape")
    if math.prod(shape) > TARGETS:
        raise UserError(f"a sparse tensor has shape {list(shape)}: a request may have {TARGETS} targets")
    cells = np.repeat(np.arange(shape[0]), np.diff(crow)) * shape[1] + columns
    if len(np.unique(cells)) != len(cells):
        raise UserError("a sparse tensor's indices do not fit its shape: a row has a column twice")
    return Tensor(values, shape, cells)


# --- results ----------------------------------------------------------------------------------------------------------


def size_of(result: ForwardBackwardResult | SampleResult) -> int:
    """About how many bytes :func:`encode` makes, or more."""
    if isinstance(result, ForwardBackwardResult):
        return 4 * sum(map(math.prod, result.shapes))
    scores = 0 if result.prompt_logprobs is None else len(result.prompt_logprobs)
    return 8 * sum(len(text.tokens) for text in result.texts) + scores + (LARGE_BYTES if result.topk is not None else 0)


def encode(result: ForwardBackwardResult | SampleResult) -> bytes:
    """The body of a result that the client reads as protobuf."""
    message = _outputs(result) if isinstance(result, ForwardBackwardResult) else _samples(result)
    content: bytes = message.SerializeToString()
    return content


def _outputs(result: ForwardBackwardResult) -> Any:
    message = schema().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics.update(_metrics(result.metrics))
    values, at = np.frombuffer(result.logprobs, "<f4"), 0
    for trailing, group in groupby(enumerate(result.shapes), key=lambda item: item[1][1:]):
        arrays = []
        for number, shape in group:
            full = np.zeros(math.prod(shape), "<f4")
            listed = result.cells.get(number)
            cells = slice(None) if listed is None else np.array(protocol.integers(listed))
            full[cells] = found = values[at : at + full[cells].size]
            at += len(found)
            arrays.append(full)
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        batched = record.fields["logprobs"]
        batched.data = np.concatenate(arrays).tobytes()
        batched.offsets = np.cumsum([0, *(array.nbytes for array in arrays)]).astype("<i8").tobytes()
        batched.dtype = schema().DTYPE_FLOAT32
        batched.trailing_shape.extend(trailing)
    return message


def _metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    named = {REDUCED.get(name, name): value for name, value in metrics.items()}
    return {"loss:sum": 0.0, **{name: value for name, value in named.items() if ":" in name}}


def _samples(result: SampleResult) -> Any:
    message = schema().SampleResponse()
    for text in result.texts:
        message.sequences.add(
            stop_reason=schema().STOP_REASON_STOP if text.finish == "stop" else schema().STOP_REASON_LENGTH,
            tokens=np.array(text.tokens, "<i4").tobytes(),
            logprobs=np.array(text.logprobs, "<f4").tobytes(),
        )
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs
    if result.topk is not None:
        tokens, logprobs = _likeliest(result.topk)
        message.topk_prompt_logprobs.token_ids = tokens.tobytes()
        message.topk_prompt_logprobs.logprobs = logprobs.tobytes()
        message.topk_prompt_logprobs.length, message.topk_prompt_logprobs.k = tokens.shape
    return message


def _likeliest(topk: protocol.PromptLogprobs) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and log-probabilities [prompt tokens, k]."""
    shape = (len(topk), topk.width)
    tokens = np.frombuffer(topk.top_tokens, "<i4").reshape(shape)
    logprobs = np.frombuffer(topk.top_logprobs, "<f4").reshape(shape)
    empty, (token, logprob) = tokens == protocol.NO_TOKEN, NO_TOKEN
    return np.where(empty, token, tokens).astype("<i4"), np.where(empty, logprob, logprobs).astype("<f4")
