"""Messages between the controller and the processes that dial in, workers and environment hosts, and their connection.

* One binary WebSocket frame carries one message: MessagePack of a tagged, typed ``msgspec.Struct``. A frame that does
  not decode raises :class:`BadFrame`; the receiver closes the connection and the sender becomes *suspect*.
* Every frame that a worker or host sends after its ``Welcome`` carries the epoch given there. The controller ignores
  frames of any other epoch, so a worker that was declared lost can never be counted twice.
* Adapters, optimizer states and training batches never travel in messages. A message names artifacts by content hash,
  and a reader signs its request for the bytes (``reads``); batches and uploads have a ticket. Bytes travel over HTTP
  (ranges allowed).

Modules: ``common`` (base classes, artifacts, batches), ``tokens``, ``worker``, ``reads``, ``envhost``, ``connection``;
encoding is here.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from rookery.bounds import MAX_FRAME as MAX_FRAME
from rookery.protocol.common import (
    PROTOCOL,
    ROW_TARGETS,
    Adam,
    AdapterRef,
    Datum,
    EpochMessage,
    Floats,
    GroupMember,
    HelloRejected,
    Integers,
    Loss,
    Manifest,
    Message,
    Shard,
    SharedPrefixGroup,
    Struct,
    TrainingBatch,
    add_metrics,
    floats,
    integers,
    manifest_of,
)
from rookery.protocol.envhost import (
    MOST_POLICIES,
    AgentStarted,
    AskModel,
    BestConstant,
    CallQueued,
    ChatMessage,
    CloseEpisode,
    FromHost,
    GetPrompts,
    HostedEnvironment,
    HostHeartbeat,
    HostHello,
    HostWelcome,
    ModelReply,
    Observation,
    Prompts,
    Reset,
    StepEpisode,
    ToHost,
)
from rookery.protocol.reads import READ_HEADER, ReadKey, may_read, read_key, sign_read
from rookery.protocol.tokens import NO_TOKEN, Likeliest, PromptLogprob, PromptLogprobs, TokenChunk, TokenLog
from rookery.protocol.worker import (
    LOADED,
    LOGPROB_BYTES,
    TEXT_PARAMETERS,
    Abort,
    AdaptersCached,
    AdaptersEvicted,
    CancelOperation,
    Draining,
    EvictArtifacts,
    FailureCategory,
    ForwardBackward,
    FromWorker,
    Generate,
    HandedOver,
    HandOver,
    Heartbeat,
    Hello,
    InitAdapter,
    LogitsParams,
    OperationDone,
    OptimStep,
    Output,
    PullFailed,
    Ready,
    Replicate,
    Retain,
    Sources,
    SourcesRequest,
    StateOperation,
    SwitchAdapter,
    ToWorker,
    TrainingOperation,
    VersionCommitted,
    VersionStaged,
    Welcome,
    Withdraw,
    WorkMessage,
    made_version,
)

T = TypeVar("T")


class BadFrame(ValueError):
    """A frame that is no message of this protocol."""


class FrameTooLarge(BadFrame):
    """A message above :data:`MAX_FRAME`, for which the receiver would close the connection."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__(f"{kind} has {size} bytes, a message at most {MAX_FRAME}")
        self.size = size


_encoder = msgspec.msgpack.Encoder()
from_worker = msgspec.msgpack.Decoder(FromWorker)
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_host = msgspec.msgpack.Decoder(FromHost)
to_host = msgspec.msgpack.Decoder(ToHost)
batches = msgspec.msgpack.Decoder(TrainingBatch)


def encode(message: Message | TrainingBatch) -> bytes:
    """The bytes of one frame."""
    return _encoder.encode(message)


def frame_of(message: Message) -> bytes:
    """:func:`encode` for a connection. Raises :class:`FrameTooLarge`."""
    frame = encode(message)
    if len(frame) > MAX_FRAME:
        raise FrameTooLarge(type(message).__name__, len(frame))
    return frame


def decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | str) -> T:
    """The message in ``frame``; raises :class:`BadFrame` for anything else."""
    if isinstance(frame, str):
        raise BadFrame("a text frame")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadFrame(str(error)) from None
