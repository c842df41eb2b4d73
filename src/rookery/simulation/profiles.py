"""How fast modelled machines are: a profile, measured on real ones or assumed, read from JSON.

No speed has a default: every one stands in a file, with where it comes from.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rookery.errors import UserError

Positive = Annotated[float, Field(gt=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Workload(_Part):
    """The jobs of a simulation; always assumed."""

    group_size: int = Field(ge=2)
    groups_per_step: int = Field(ge=1)
    max_tokens: int = Field(ge=1)
    """Of a reply; longer ones are cut."""
    median_tokens: float = Field(gt=0)
    """Of a reply …"""
    sigma: float = Field(ge=0)
    """… whose length is log-normal with this standard deviation of its logarithm."""
    prompt_tokens: int = Field(ge=1)
    environment: float = Field(ge=0)
    """Seconds that a reset or a step of the environment takes."""


class Machine(_Part):
    """One kind of machine with one base model. Times are seconds, sizes bytes."""

    price: float = Field(1.0, gt=0)
    """Of an hour of it, reserved, in any unit that is the same for all machines of a profile."""
    rows: int = Field(ge=1)
    """Sequences that decode together at most."""
    cache_tokens: int = Field(1 << 40, ge=1)
    """Tokens that its KV cache holds."""
    context: int = Field(ge=2)
    """The longest sequence, in tokens."""
    decode: list[tuple[Annotated[int, Field(ge=1)], Positive]] = Field(min_length=1)
    """(rows, seconds of one decode step with so many rows), ascending; between two points on the line that joins
    them, beyond the last on the last line prolonged."""
    prefill_token: float = Field(ge=0)
    """Seconds per prompt token."""
    prefill_slice: int = Field(ge=1)
    """Prompt tokens computed in one slice, between two decode steps."""
    train_token: float = Field(ge=0)
    """Seconds per token of a training batch, forward and backward; a group's prompt counts once."""
    train_slice: int = Field(ge=1)
    """Tokens of one slice of training, between two decode steps."""
    optimizer: float = Field(ge=0)
    """An optimizer step, or the making of a new adapter."""
    adapter_bytes: int = Field(ge=0)
    """Bytes that a rollout worker pulls for a version."""
    state_bytes: int = Field(ge=0)
    """Bytes that the optimizer state adds when a version is committed, or loaded for training."""
    download: Positive
    """Bytes per second from the service, per worker."""
    upload: Positive
    """Bytes per second to the service."""
    load: float = Field(ge=0)
    """From the machine's start to a loaded base model."""
    latency: float = Field(ge=0)
    """Seconds of a transfer before its first byte."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        rows = [rows for rows, _ in self.decode]
        if rows != sorted(set(rows)):
            raise ValueError("decode: rows ascend")
        return self

    def decode_step(self, rows: int) -> float:
        """Seconds of one decode step of ``rows`` sequences."""
        points = self.decode
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        at = min(max(bisect_left(points, (rows, 0.0)), 1), len(points) - 1)
        (low, first), (high, second) = points[at - 1], points[at]
        return first + (second - first) * (rows - low) / (high - low)

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


class Profile(_Part):
    """The machines of a simulation, and what is run on them."""

    name: str
    label: Literal["measured", "assumed"]
    """Whether the speeds were measured or assumed; shown with every result."""
    sources: dict[str, str]
    """Where each figure comes from, by its name."""
    reserved: Machine
    preemptible: Machine | None = None
    """None is the same as the reserved one."""
    workload: Workload

    @property
    def spot(self) -> Machine:
        """The preemptible machine."""
        return self.preemptible if self.preemptible is not None else self.reserved


def packaged(suffix: str) -> list[str]:
    """Names of the profiles (``json``) or traces (``csv``) that come with the package."""
    files = resources.files("rookery.simulation").joinpath("data").iterdir()
    return sorted(file.name.removesuffix(f".{suffix}") for file in files if file.name.endswith(f".{suffix}"))


def read_input(kind: str, name: str, suffix: str) -> str:
    """The text of a packaged profile or trace by its name, or of a file by its path. Raises :class:`UserError`."""
    known = packaged(suffix)
    folder = resources.files("rookery.simulation").joinpath("data")
    try:
        return (folder.joinpath(f"{name}.{suffix}") if name in known else Path(name)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        allowed = f"one of {', '.join(known)}, or the path of a {suffix.upper()} file"
        raise UserError(f"{kind}: given {name!r}, allowed: {allowed}") from None


def load_profile(name: str) -> Profile:
    """A packaged profile by its name, or one from a JSON file by its path. Raises :class:`UserError`."""
    text = read_input("profile", name, "json")
    try:
        return Profile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "profile"
        raise UserError(f"profile {name}: {where}: {first['msg']}") from None
