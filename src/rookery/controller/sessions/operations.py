"""What clients ask for call by call, and what comes of it: the form in which both are stored.

Whoever speaks a client's protocol translates to and from these; nothing here knows of HTTP or protobuf.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rookery import protocol
from rookery.storage.rows import CheckpointKind


class Operation(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Base of the calls."""


class CreateModel(Operation):
    """Version 0 from a seed; the model's row says the rest. Without ``seed`` the model's name decides."""

    seed: int | None = None


class ForwardBackward(Operation):
    """A batch's loss and log-probabilities, and (not ``forward_only``) its gradient, added to what is there."""

    batch: bytes
    """An encoded :class:`rookery.protocol.Batch` of data."""
    shapes: list[list[int]]
    """Of each datum's targets."""
    loss: protocol.Loss
    forward_only: bool = False
    cells: dict[int, list[int]] = {}
    """For data whose targets are sparse: which cells of their shape, row by row, the targets are."""


class InvalidOperation(Operation):
    """A call that cannot be carried out as it was sent; it has its number all the same, and others wait behind it.
    ``gradient``: it would have added to one."""

    error: str
    gradient: bool = False


class OptimStep(Operation):
    adam: protocol.Adam


class SaveState(Operation):
    """Keep the present state under a name; ``kind`` says what for."""

    kind: CheckpointKind
    name: str
    ttl: float | None = None
    overwrite: bool = False
    about: dict[str, Any] = {}


class SaveSampler(Operation):
    """Make the present state a sampler. ``inflight``: one that follows the model's later calls of this kind."""

    sampler: str
    inflight: bool = False


class LoadState(Operation):
    """Go on from a checkpoint; without ``optimizer`` its moments start anew."""

    path: str
    optimizer: bool


class Sample(Operation):
    """``stop_tokens`` None: those that end the model's replies."""

    sampler: str
    prompt: list[int]
    count: int
    max_tokens: int | None
    temperature: float
    seed: int | None
    stop: list[str]
    stop_tokens: list[int] | None
    prompt_logprobs: bool = False
    last: int | None = None
    """Only the prompt's last tokens are scored."""
    topk: int = 0


AnyCall = CreateModel | ForwardBackward | InvalidOperation | OptimStep | SaveState | SaveSampler | LoadState | Sample


class OperationResult(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Base of what a call comes to."""


class OperationFailed(OperationResult):
    error: str
    category: Literal["unknown", "server", "user"]


class ModelCreated(OperationResult):
    model: str


class ForwardBackwardResult(OperationResult):
    """``logprobs``: float32 little-endian, all data's targets in order; ``shapes`` and ``cells`` as in the call."""

    metrics: dict[str, float]
    logprobs: bytes
    shapes: list[list[int]]
    cells: dict[int, list[int]] = {}


class OptimStepResult(OperationResult):
    metrics: dict[str, float]


class StateSaved(OperationResult):
    path: str
    size: int


class SamplerSaved(OperationResult):
    sampler: str


class StateLoaded(OperationResult):
    path: str
    model: str


class SampledSequence(msgspec.Struct, omit_defaults=True, kw_only=True):
    tokens: list[int]
    logprobs: list[float]
    finish: str


class SampleResult(OperationResult):
    """``prompt_logprobs``: one per prompt token, NaN where there is none; ``topk``: per prompt token the likeliest
    tokens with their log-probabilities, best first."""

    texts: list[SampledSequence]
    prompt_logprobs: list[float] | None = None
    topk: list[list[tuple[int, float]]] | None = None


AnyOutcome = (
    OperationFailed
    | ModelCreated
    | ForwardBackwardResult
    | OptimStepResult
    | StateSaved
    | SamplerSaved
    | StateLoaded
    | SampleResult
)

encode = msgspec.msgpack.Encoder().encode
calls = msgspec.msgpack.Decoder(AnyCall)
outcomes = msgspec.msgpack.Decoder(AnyOutcome)
