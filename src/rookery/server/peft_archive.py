"""PEFT adapter folders on their way in and out, as tar streams of their two files.

What leaves holds the adapter alone: never the trainer's state that lies beside it in the artifact. What comes in is
read in memory by name, so a hostile archive can write nothing anywhere, and takes no more memory than it has bytes.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from io import BufferedReader

from rookery.errors import NotFound, UserError
from rookery.protocol import Manifest, Shard
from rookery.storage.artifacts import Artifacts

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""A PEFT folder: what a version's download holds, and what an upload must bring."""

MOST_MEMBERS = 256
"""Of an uploaded archive. A PEFT folder has a handful of files, even with checkpoints beside it; each one takes some
memory while the archive is read."""

BROKEN = (tarfile.TarError, EOFError, OSError, ValueError, ArithmeticError, LookupError, RecursionError)
"""What :mod:`tarfile` raises for bytes that are no archive, or a broken one."""

PIECE = 1 << 20
"""Bytes read from the disk at a time while a download runs."""


def pack(artifacts: Artifacts, manifest: Manifest, created: float) -> tuple[int, Iterator[bytes]]:
    """The tar of a version's adapter files: its size in bytes and its pieces. The files are opened before this returns,
    so that a version retired meanwhile still arrives whole; the iterator closes them."""
    shards = [shard for shard in manifest.shards if shard.name in ADAPTER_FILES]
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(artifacts.path(manifest.hash, shard.name).open("rb")) for shard in shards]
        except FileNotFoundError:
            raise NotFound("this version's adapter is not kept any more") from None
        held = opened.pop_all()
    size = sum(512 + shard.size + _padding(shard.size) for shard in shards) + 1024
    return size, _pieces(shards, files, held, created)


def _pieces(shards: list[Shard], files: list[BufferedReader], held: ExitStack, created: float) -> Iterator[bytes]:
    with held:
        for shard, file in zip(shards, files, strict=True):
            about = tarfile.TarInfo(shard.name)
            about.size, about.mtime, about.mode = shard.size, int(created), 0o644
            yield about.tobuf(tarfile.USTAR_FORMAT)
            while piece := file.read(PIECE):
                yield piece
            yield bytes(_padding(shard.size))
        yield bytes(1024)


def _padding(size: int) -> int:
    return -size % 512


def unpack(content: bytes) -> dict[str, bytes]:
    """The files of an uploaded PEFT folder by name. Raises :class:`UserError` saying what is wrong with it."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:  # unpacked, a small one could be anything
            for number, member in enumerate(archive, 1):
                name = member.name.rsplit("/", 1)[-1]
                _refuse(member, name, number, len(content))
                if name in ADAPTER_FILES:
                    if name in files:
                        raise tarfile.ReadError(f"it has {name} twice")
                    extracted = archive.extractfile(member)
                    assert extracted is not None  # a regular file has content
                    files[name] = extracted.read()
    except BROKEN as error:
        raise UserError(
            f"adapter: the body is no tar archive ({error}); send the PEFT folder as a tar, not compressed"
        ) from None
    missing = [name for name in ADAPTER_FILES if name not in files]
    if missing:
        raise UserError(f"adapter: the archive has no {' and no '.join(missing)}; send a folder that PEFT saved")
    try:
        config = json.loads(files[ADAPTER_FILES[0]])
    except ValueError:
        raise UserError(f"adapter: {ADAPTER_FILES[0]} is not JSON; send a folder that PEFT saved") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UserError(f"adapter: {ADAPTER_FILES[0]} does not say peft_type LORA; only LoRA adapters can be used")
    return files


def _refuse(member: tarfile.TarInfo, name: str, number: int, most: int) -> None:
    """Raises :class:`tarfile.ReadError` for what makes reading on take more time or memory than the archive has bytes,
    and for one of the adapter's files that is none."""
    if number > MOST_MEMBERS:
        raise tarfile.ReadError(f"it has more than {MOST_MEMBERS} files")
    shown = name if name in ADAPTER_FILES else f"file {number}"  # other names can be anything, of any length
    if member.size > most:
        raise tarfile.ReadError(f"{shown} is larger than the archive")
    if member.size < 0:  # what follows it would be read again and again
        raise tarfile.ReadError(f"{shown} has a negative size")
    if member.issparse():  # its holes are read as zeros that nobody sent
        raise tarfile.ReadError(f"{shown} is sparse")
    if name in ADAPTER_FILES and not member.isreg():
        raise tarfile.ReadError(f"{shown} is no plain file")
