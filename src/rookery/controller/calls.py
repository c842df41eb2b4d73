"""What clients ask for call by call, and what comes of it: the form in which both are stored.

Whoever speaks a client's protocol translates to and from these; nothing here knows of HTTP or protobuf.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rookery import wire
from rookery.storage.rows import CheckpointKind


class Call(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Base of the calls."""


class CreateModel(Call):
    """Version 0 from a seed; the model's row says the rest. Without ``seed`` the model's name decides."""

    seed: int | None = None


class Compute(Call):
    """A batch's loss and log-probabilities, and (not ``forward_only``) its gradient, added to what is there."""

    batch: bytes
    """An encoded :class:`rookery.wire.Batch` of data."""
    shapes: list[list[int]]
    """Of each datum's targets."""
    loss: wire.Loss
    forward_only: bool = False
    cells: dict[int, list[int]] = {}
    """For data whose targets are sparse: which cells of their shape, row by row, the targets are."""


class Refused(Call):
    """A call that cannot be carried out as it was sent; it has its number all the same, and others wait behind it.
    ``gradient``: it would have added to one."""

    error: str
    gradient: bool = False


class Step(Call):
    adam: wire.Adam


class SaveState(Call):
    """Keep the present state under a name; ``kind`` says what for."""

    kind: CheckpointKind
    name: str
    ttl: float | None = None
    overwrite: bool = False
    about: dict[str, Any] = {}


class SaveSampler(Call):
    """Make the present state a sampler. ``inflight``: one that follows the model's later calls of this kind."""

    sampler: str
    inflight: bool = False


class LoadState(Call):
    """Go on from a checkpoint; without ``optimizer`` its moments start anew."""

    path: str
    optimizer: bool


class Sample(Call):
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


AnyCall = CreateModel | Compute | Refused | Step | SaveState | SaveSampler | LoadState | Sample


class Outcome(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Base of what a call comes to."""


class Failed(Outcome):
    error: str
    category: Literal["unknown", "server", "user"]


class Created(Outcome):
    model: str


class Computed(Outcome):
    """``logprobs``: float32 little-endian, all data's targets in order; ``shapes`` and ``cells`` as in the call."""

    metrics: dict[str, float]
    logprobs: bytes
    shapes: list[list[int]]
    cells: dict[int, list[int]] = {}


class Stepped(Outcome):
    metrics: dict[str, float]


class Saved(Outcome):
    path: str
    size: int


class SamplerMade(Outcome):
    sampler: str


class Loaded(Outcome):
    path: str
    model: str


class Text(msgspec.Struct, omit_defaults=True, kw_only=True):
    tokens: list[int]
    logprobs: list[float]
    finish: str


class Answered(Outcome):
    """``prompt_logprobs``: one per prompt token, NaN where there is none; ``topk``: per prompt token the likeliest
    tokens with their log-probabilities, best first."""

    texts: list[Text]
    prompt_logprobs: list[float] | None = None
    topk: list[list[tuple[int, float]]] | None = None


AnyOutcome = Failed | Created | Computed | Stepped | Saved | SamplerMade | Loaded | Answered

encode = msgspec.msgpack.Encoder().encode
calls = msgspec.msgpack.Decoder(AnyCall)
outcomes = msgspec.msgpack.Decoder(AnyOutcome)
