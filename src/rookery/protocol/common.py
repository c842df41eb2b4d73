"""Base classes, artifacts and adapter references, which all messages share; and the training batch that a worker
fetches with a ticket.

An artifact is a set of files named by the hash of its manifest. Messages name artifacts by hash; the bytes travel over
HTTP.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec

from rookery.bounds import Count, Integer, Name

PROTOCOL = 14
"""Version of the protocol. Both ends of a connection must use the same one."""


class Message(msgspec.Struct, tag=True, omit_defaults=True):
    """Base class of every message: one frame of a connection."""


class EpochMessage(Message, kw_only=True):
    """Base class of the messages that a worker or host sends after its welcome. The connection on which one is sent
    gives it the ``epoch`` of that welcome (:meth:`rookery.protocol.connection.Channel.send`)."""

    epoch: Integer = 0


class Struct(msgspec.Struct, omit_defaults=True):
    """Base class of the parts of messages."""


MOST_SHARDS = 10_000
"""Files of one artifact: a whole model has some hundred."""


class Shard(Struct, kw_only=True):
    """One file of an artifact: its name inside the folder, its size in bytes, the SHA-256 of its bytes in hex."""

    name: Name
    size: Count
    sha256: Name


class Manifest(Struct, kw_only=True):
    """An artifact: a PEFT adapter folder or a whole model's, with or without the trainer's state.

    ``hash`` is the SHA-256 over the sorted shards' (name, size, sha256) and names the artifact everywhere.
    """

    hash: Name
    shards: Annotated[list[Shard], msgspec.Meta(max_length=MOST_SHARDS)]

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(shard.size for shard in self.shards)


def manifest_of(shards: Iterable[Shard]) -> Manifest:
    """The manifest of these files. Its hash is that of the compact JSON ``[[name, size, sha256], …]``, by name."""
    ordered = sorted(shards, key=lambda shard: shard.name)
    listing = msgspec.json.encode([[shard.name, shard.size, shard.sha256] for shard in ordered])
    return Manifest(hash=hashlib.sha256(listing).hexdigest(), shards=ordered)


class AdapterRef(Struct, kw_only=True):
    """One immutable version of a policy and where a worker reads it. ``hash`` names its manifest. ``rank`` 0 is a
    full-parameter version: a whole model instead of an adapter."""

    policy: str
    version: int
    hash: str
    rank: int
    alpha: float
    sources: list[str] = msgspec.field(default_factory=list)
    """Addresses of workers that hold the artifact or receive it, in the order in which to read from them,
    ``GET {source}/artifacts/{hash}/{shard}``; after them the service, ``GET {base}/wire/artifacts/{hash}/{shard}``.
    The hash proves the bytes, so a source need not be trusted."""
    base: str = ""
    """An earlier full-parameter version that the worker has: a source may send the difference to it,
    ``GET {source}/artifacts/{hash}/{shard}?base={base}``. Empty: none."""

    def replaces(self, old: AdapterRef | None, in_flight: str) -> bool:
        """Whether a text that ``old`` began continues with this version under the request's ``in_flight``: a newer
        one of its policy, where the text may change its version."""
        return old is not None and in_flight != "finish" and self.policy == old.policy and self.version > old.version


class HelloRejected(Message, kw_only=True):
    """The service refuses the connection and the other end must not retry. ``reason`` is one line for its operator."""

    reason: str


# --- training batches ------------------------------------------------------------------------------------------------


class GroupMember(Struct, kw_only=True):
    """One trajectory after its group's prompt: parallel lists with one entry per token of the tail.

    ``logprobs`` are the behaviour policy's; entries where ``weights`` is 0 are ignored (tokens of the environment carry
    no loss). ``weights`` multiply the token's loss term: the algorithm's normalisation lives there, not in the loss."""

    tokens: list[int]
    logprobs: list[float]
    advantages: list[float]
    weights: list[float]


class SharedPrefixGroup(Struct, kw_only=True):
    """Trajectories with one common prompt, which the trainer computes once, forward and backward. A prompt has at
    least one token: the first tail token is predicted from the prompt's last."""

    prompt: list[int]
    members: list[GroupMember]


Integers = list[int] | bytes
"""Also as the bytes of little-endian int32: a list takes ten times as much memory, and much longer to decode."""

Floats = list[float] | bytes
"""Also as the bytes of little-endian float32."""


def integers(values: Integers) -> Sequence[int]:
    """Raises ``ValueError`` for bytes that end within a number."""
    return _whole(values).cast("i") if isinstance(values, bytes) else values


def floats(values: Floats) -> Sequence[float]:
    """Raises ``ValueError`` for bytes that end within a number."""
    return _whole(values).cast("f") if isinstance(values, bytes) else values


def _whole(content: bytes) -> memoryview:
    if len(content) % 4:
        raise ValueError(f"{len(content)} bytes are not whole numbers of four bytes")
    return memoryview(content)


ROW_TARGETS = 1024
"""Most targets of one token: distillation from a distribution's likeliest tokens takes some tens."""


class Datum(Struct, kw_only=True):
    """A sequence with arbitrary targets: ``targets[i]`` is scored as the token after ``tokens[: rows[i] + 1]``.
    The other lists are parallel to ``targets``, with the meaning that they have in :class:`GroupMember`, except that a
    target is scored whatever its weight. A row may have several targets (a distribution), at most
    :data:`ROW_TARGETS`, or none. Without ``rows`` all have equally many, in order. Without ``logprobs`` or
    ``advantages`` they are 0, without ``weights`` 1."""

    tokens: Integers
    rows: Integers = b""
    targets: Integers
    logprobs: Floats = b""
    advantages: Floats = b""
    weights: Floats = b""


class TrainingBatch(Struct, kw_only=True):
    """The data of one ``forward_backward``."""

    groups: list[SharedPrefixGroup] = msgspec.field(default_factory=list)
    data: list[Datum] = msgspec.field(default_factory=list)


class Loss(Struct, kw_only=True):
    """A loss by name with its parameters (algorithms/losses). A pure sum over tokens."""

    name: str
    params: dict[str, float] = msgspec.field(default_factory=dict)


class Adam(Struct, kw_only=True):
    """Parameters of one AdamW step."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled (AdamW)."""
    clip: float = 0.0
    """Global gradient norm; 0 is off."""


def add_metrics(sums: dict[str, float], metrics: Mapping[str, float]) -> None:
    """Add a trainer's metrics to ``sums``: values, except maxima where the name ends in ``:max``. NaN stays NaN."""
    for name, value in metrics.items():
        known = sums.get(name)
        if known is not None:
            largest = name.endswith(":max") and not math.isnan(known + value)
            value = max(known, value) if largest else known + value
        sums[name] = value
