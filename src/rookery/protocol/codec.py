"""Encoding of messages and training batches: MessagePack of tagged, typed structs, one message per binary frame."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from rookery.protocol.common import Message, TrainingBatch
from rookery.protocol.envhost import FromHost, ToHost
from rookery.protocol.worker import FromWorker, ToWorker

MAX_FRAME = 64 << 20
"""Size limit of one frame in bytes; an end closes a connection that brings a larger one. The largest frames carry an
environment's texts and options with a job's rows, so senders of a tenant's texts check the size first."""

T = TypeVar("T")


class BadFrame(ValueError):
    """A frame that is no message of this protocol."""


_encoder = msgspec.msgpack.Encoder()
from_worker = msgspec.msgpack.Decoder(FromWorker)
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_host = msgspec.msgpack.Decoder(FromHost)
to_host = msgspec.msgpack.Decoder(ToHost)
batches = msgspec.msgpack.Decoder(TrainingBatch)


def encode(message: Message | TrainingBatch) -> bytes:
    """The bytes of one frame."""
    return _encoder.encode(message)


def decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | str) -> T:
    """The message in ``frame``; raises :class:`BadFrame` for anything else."""
    if isinstance(frame, str):
        raise BadFrame("a text frame")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadFrame(str(error)) from None
