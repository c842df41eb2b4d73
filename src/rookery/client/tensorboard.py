"""Event files of TensorBoard, written without its package.

A record has a length, a checksum, its data and a checksum. The data is TensorFlow's message ``Event`` as Protocol
Buffers encode it, of which a scalar needs four fields.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

FILE_VERSION = b"brain.Event:2"
"""The event at the beginning of a file."""


def event(
    time: float,
    step: int = 0,
    values: Mapping[str, float] | None = None,
    version: bytes = b"",
    restart: bool = False,
) -> bytes:
    """One record: ``values`` at ``step``, the ``version`` with which a file begins, or the ``restart`` of a job at
    ``step``, with which readers forget the values from there on."""
    data = b"\x09" + struct.pack("<d", time)  # field 1, wall_time
    if step:
        data += b"\x10" + _varint(step)  # field 2, step
    if version:
        data += _field(3, version)
    if values:
        data += _field(5, b"".join(_field(1, _scalar(name, value)) for name, value in values.items()))
    if restart:
        data += _field(7, b"\x08\x01")  # session_log: its status is START
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _scalar(name: str, value: float) -> bytes:
    """``Summary.Value``: a tag and a float32, in which a larger number is infinite."""
    try:
        single = struct.pack("<f", value)
    except OverflowError:
        single = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _field(1, name.encode()) + b"\x15" + single


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _table() -> list[int]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        found.append(value)
    return found


_TABLE = _table()


def _masked(data: bytes) -> bytes:
    """The checksum of a record: CRC-32C, rotated and shifted as TensorFlow's readers expect."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
