"""Operations of clients that drive training and sampling call by call, and their results: one type per operation.

``server/tinker`` makes an operation of a request, the database stores it, ``training_run`` or ``samplers``
executes it, and ``server/tinker`` writes its result. Nothing here knows HTTP or protobuf.

A tag identifies the type of a stored operation: it stays when a class is renamed.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rookery import protocol
from rookery.controller.quotas import OPERATION_BYTES
from rookery.errors import UserError
from rookery.storage.models import CheckpointKind


class OperationRefused(UserError):
    """The operation can be decoded, but its model cannot execute it."""


class Operation(msgspec.Struct, omit_defaults=True, kw_only=True, tag=True):
    """Base."""

    @property
    def adds_gradient(self) -> bool:
        """Whether it adds to the training run's gradient if it succeeds."""
        return False

    @property
    def is_step(self) -> bool:
        """Whether it takes a step on the training run's gradient if it succeeds, and drops it if it fails."""
        return False

    @property
    def size(self) -> int:
        """Bytes of memory while it waits."""
        return OPERATION_BYTES


class CreateModel(Operation):
    """Make version 0 of a training run. Without ``seed`` the run's id determines the weights."""

    seed: int | None = None


class ForwardBackwardOperation(Operation, tag="Compute"):
    """Compute a batch's loss and log-probabilities; unless ``forward_only``, add its gradient to the run's."""

    batch: bytes
    """An encoded :class:`rookery.protocol.TrainingBatch`."""
    shapes: list[list[int]]
    """The shape of each datum's targets: ``[tokens]`` or ``[tokens, k]``."""
    loss: protocol.Loss
    forward_only: bool = False
    cells: dict[int, protocol.Integers] = {}
    """By datum with sparse targets: the indices of its targets in the flattened shape."""

    @property
    def adds_gradient(self) -> bool:
        return not self.forward_only

    @property
    def size(self) -> int:
        return OPERATION_BYTES + len(self.batch)


class InvalidOperation(Operation, tag="Refused"):
    """A request that cannot be executed as it was sent. It keeps its sequence number, so that later ones can run."""

    error: str
    gradient: bool = False
    """It was meant to add a gradient."""
    step: bool = False
    """It was meant to take a step."""
    digest: str = ""
    """Of the operation that it replaces, so that its repetition is the same request; empty for one that could not be
    decoded."""

    @property
    def adds_gradient(self) -> bool:
        return self.gradient

    @property
    def is_step(self) -> bool:
        return self.step

    @classmethod
    def instead_of(cls, operation: Operation, error: str, digest: str = "") -> InvalidOperation:
        """``operation`` will not be executed; its result is ``error``."""
        return cls(error=error, gradient=operation.adds_gradient, step=operation.is_step, digest=digest)


class OptimStepOperation(Operation, tag="Step"):
    adam: protocol.Adam

    @property
    def is_step(self) -> bool:
        return True


class SaveState(Operation):
    """Keep the current state as a checkpoint."""

    kind: CheckpointKind
    name: str
    ttl: float | None = None
    """Seconds until it expires."""
    overwrite: bool = False
    about: dict[str, Any] = {}


class SaveSampler(Operation):
    """Make a sampler of the current state; ``inflight``: one that follows the run's later in-flight saves."""

    sampler: str
    inflight: bool = False


class LoadState(Operation):
    """Replace the state by a checkpoint's; without ``optimizer`` the Adam moments start at zero."""

    path: str
    optimizer: bool


LONG_ANSWER = 8192
"""Tokens that an answer without a limit, or with a higher one, counts as: hardly any is longer."""


class Sample(Operation):
    sampler: str
    prompt: list[int]
    count: int
    max_tokens: int | None
    temperature: float
    seed: int | None
    stop: list[str]
    stop_tokens: list[int] | None
    """None: the tokens that end the model's replies."""
    prompt_logprobs: bool = False
    last: int | None = None
    """Score only this many of the prompt's last tokens."""
    topk: int = 0

    @property
    def tokens(self) -> int:
        """The most tokens that it holds, as far as they count."""
        return len(self.prompt) + self.count * min(self.max_tokens or LONG_ANSWER, LONG_ANSWER)


AnyOperation = (
    CreateModel
    | ForwardBackwardOperation
    | InvalidOperation
    | OptimStepOperation
    | SaveState
    | SaveSampler
    | LoadState
    | Sample
)


class OperationResult(msgspec.Struct, omit_defaults=True, kw_only=True, tag=True):
    """Base. Field names are those of the Tinker API where the API has the field."""


class OperationFailed(OperationResult, tag="Failed"):
    error: str
    category: Literal["unknown", "server", "user"]


class ModelCreated(OperationResult, tag="Created", rename={"model_id": "model"}):
    model_id: str


class ForwardBackwardResult(OperationResult, tag="Computed"):
    """``logprobs``: float32 little-endian, the targets of all data in order; ``shapes`` and ``cells`` as in
    :class:`ForwardBackwardOperation`."""

    metrics: dict[str, float]
    logprobs: bytes
    shapes: list[list[int]]
    cells: dict[int, protocol.Integers] = {}


class OptimStepResult(OperationResult, tag="Stepped"):
    metrics: dict[str, float]


class StateSaved(OperationResult, tag="Saved", rename={"size_bytes": "size"}):
    path: str
    size_bytes: int


class SamplerSaved(OperationResult, tag="SamplerMade", rename={"sampling_session_id": "sampler"}):
    sampling_session_id: str


class StateLoaded(OperationResult, tag="Loaded", rename={"model_id": "model"}):
    path: str
    model_id: str


class SampledSequence(protocol.TokenLog, omit_defaults=True, kw_only=True):
    finish: str


class SampleResult(OperationResult, tag="Answered"):
    """``prompt_logprobs``: float32 little-endian, one per prompt token, NaN where there is none; ``topk``: per prompt
    token the most likely tokens with their log-probabilities, best first."""

    texts: list[SampledSequence]
    prompt_logprobs: bytes | None = None
    topk: protocol.PromptLogprobs | None = None


AnyResult = (
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
decode_operation = msgspec.msgpack.Decoder(AnyOperation).decode
decode_result = msgspec.msgpack.Decoder(AnyResult).decode
