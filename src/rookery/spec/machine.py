"""How fast a machine is with one base model, and the work of a job's step: what simulations model and plans predict
with."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from rookery.bounds import GivenModel

MOST, LEAST = 1e18, 1e-18
"""Of any time, price, size or rate that is not 0: their sums, products and quotients are numbers still."""

Positive = Annotated[float, Field(ge=LEAST, le=MOST)]
Time = Annotated[float, Field(ge=0, le=MOST)]
Bytes = Annotated[int, Field(ge=0, le=1 << 60)]
Count = Annotated[int, Field(ge=1, le=1 << 40)]


class FrozenModel(GivenModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MachineMemory(FrozenModel):
    """Bytes of a machine's memory and of what lies in it."""

    total: int = Field(ge=1, le=1 << 60)
    """The resources that a worker may use."""
    base: Bytes
    """The base model."""
    cache_token: Bytes
    """One token in the KV cache."""
    train_token: Bytes
    """Activations of one token of a training slice."""
    states: Bytes | None = None
    """For training states and the copy of one on its way to files; None: as many as the rest leaves."""
    state: Bytes | None = None
    """One training state; None: as many as ``state_bytes`` of the machine, which are those of its file."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.base > self.total:
            raise ValueError(f"base: given {self.base}, allowed: at most total, {self.total}")
        if (left := self.total - self.base) < (self.states or 0):
            raise ValueError(f"states: given {self.states}, allowed: at most total - base, {left}")
        return self


class Machine(FrozenModel):
    """One kind of machine with one base model. Times are seconds, sizes bytes."""

    price: Positive = 1.0
    """Of an hour of it, reserved, in any unit that is the same for all machines of a profile."""
    rows: Count
    """Sequences that decode together at most."""
    cache_tokens: Count = 1 << 40
    """Tokens that its KV cache holds."""
    context: int = Field(ge=2, le=1 << 40)
    """The longest sequence, in tokens."""
    decode: list[tuple[Count, Positive]] = Field(min_length=1)
    """(rows, seconds of one decode step with so many rows), both ascending; between two points on the line that joins
    them, beyond the last on the last line prolonged."""
    prefill_token: Time
    """Seconds per prompt token."""
    prefill_slice: Count
    """Prompt tokens computed in one slice, between two decode steps."""
    train_token: Time
    """Seconds per token of a training batch, forward and backward; a group's prompt counts once."""
    train_slice: Count
    """Tokens of one slice of training, between two decode steps."""
    optimizer: Time
    """An optimizer step, or the making of a new adapter."""
    adapter_bytes: Bytes
    """Bytes that a rollout worker pulls for a version."""
    state_bytes: Bytes
    """Bytes that the optimizer state adds when a version is committed, or loaded for training."""
    download: Positive
    """Bytes per second from the service, per worker."""
    upload: Positive
    """Bytes per second to the service."""
    load: Time
    """From the machine's start to a loaded base model."""
    latency: Time
    """Seconds of a transfer before its first byte."""
    memory: MachineMemory | None = None
    """None: ``rows`` and ``cache_tokens`` say all that fits."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.rows > self.cache_tokens:
            raise ValueError(f"rows: given {self.rows}, allowed: at most cache_tokens, {self.cache_tokens}")
        rows = [rows for rows, _ in self.decode]
        if rows != sorted(set(rows)):
            raise ValueError("decode: rows ascend")
        seconds = [seconds for _, seconds in self.decode]
        if seconds != sorted(seconds):
            raise ValueError("decode: a step of more rows takes as long or longer; measure again")
        return self

    def decode_step(self, rows: int) -> float:
        """Seconds of one decode step of ``rows`` sequences."""
        return decode_seconds(self.decode, rows)

    @cached_property
    def costs(self) -> dict[Literal["prefill", "decode", "train"], list[tuple[float, float]]]:
        """As a worker reports them."""
        prefill = [(1.0, self.prefill_token), (float(self.prefill_slice), self.prefill_slice * self.prefill_token)]
        return {"decode": [(float(rows), seconds) for rows, seconds in self.decode], "prefill": prefill}

    def pull(self, *, state: bool = False) -> float:
        """Seconds until a version is here, ``state`` and all where it is to be trained on."""
        return self.latency + (self.adapter_bytes + self.state_bytes * state) / self.download

    def push(self) -> float:
        """Seconds until a committed version is at the service."""
        return self.latency + (self.adapter_bytes + self.state_bytes) / self.upload


class Workload(FrozenModel):
    """The work of one optimizer step of a job, with the bounds of a job's fields."""

    group_size: int = Field(ge=2, le=1024)
    groups_per_step: int = Field(ge=1, le=4096)
    max_tokens: int = Field(ge=1, le=131072)
    """Of a reply; longer ones are cut."""
    median_tokens: Positive
    """Of a reply, whose length is log-normal."""
    sigma: float = Field(ge=0, le=3)
    """The standard deviation of the logarithm of that length."""
    prompt_tokens: Count
    environment: Time
    """Seconds that a reset or a step of the environment takes."""

    @property
    def episodes(self) -> int:
        """Episodes of a step."""
        return self.group_size * self.groups_per_step

    @model_validator(mode="after")
    def _replies_end(self) -> Self:
        if self.median_tokens > self.max_tokens:
            raise ValueError(f"median_tokens: given {self.median_tokens:g}, allowed: at most max_tokens,"
                             f" {self.max_tokens}")  # fmt: skip
        return self


def decode_seconds(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Seconds of one decode step of ``rows`` sequences, by ``points`` as :attr:`Machine.decode` has them."""
    if rows <= points[0][0] or len(points) == 1:
        return points[0][1]
    at = min(max(bisect_left(points, (rows, 0.0)), 1), len(points) - 1)
    (low, first), (high, second) = points[at - 1], points[at]
    return first + (second - first) * (rows - low) / (high - low)
