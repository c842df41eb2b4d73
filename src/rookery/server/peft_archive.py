"""PEFT adapter folders as tar streams: packing a version for download, unpacking an upload; single files.

A download contains the adapter's files, or those of a whole model, never the trainer state in the same artifact. Of an
upload, only the two files of an adapter are read, by name, so a hostile archive cannot write any other file and uses no
more bytes than it has.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from fastapi import Response

from rookery.errors import UserError
from rookery.protocol import Manifest, Shard
from rookery.server.responses import Stream
from rookery.spec.peft_folder import CONFIG_BYTES, CONFIG_FILE, WEIGHTS_FILE, check_finite, read_lora
from rookery.storage.artifacts import Artifacts

ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""The files of a PEFT folder, which an upload must have."""

TRAINER_STATE = "trainer_state."
"""First part of the names of files that only a trainer reads."""

CANARY = "canary."
"""First part of the name of the file that engines compare themselves with."""

MAX_MEMBERS = 256
"""Most files in an uploaded archive. A PEFT folder has a handful of files, even with checkpoints; each uses some memory
while the archive is read."""

BROKEN = (tarfile.TarError, EOFError, OSError, ValueError, ArithmeticError, LookupError, RecursionError)
"""Exceptions of :mod:`tarfile` for bytes that are not an archive, or a broken one."""

CHUNK_BYTES = 1 << 20
"""Bytes of an uploaded file that are read at once."""

RANGE = re.compile(r"bytes=(\d{1,18})-")
"""The ranges that are served: a download that resumes where it broke. For others the whole file is sent."""


def pack(artifacts: Artifacts, manifest: Manifest, created: float) -> tuple[int, Iterator[bytes]]:
    """The tar of a version's files, without its trainer state and its canary: its size in bytes and its chunks. The
    files are opened before this returns, so that a version that is deleted meanwhile still arrives complete; the
    iterator closes them."""
    shards = [shard for shard in manifest.shards if not shard.name.startswith((TRAINER_STATE, CANARY))]
    with ExitStack() as opened:
        files = [opened.enter_context(artifacts.reading(manifest.hash, shard)) for shard in shards]
        held = opened.pop_all()
    size = sum(512 + shard.size + _padding(shard.size) for shard in shards) + 1024
    return size, _chunks(shards, files, held, created)


def stream(artifacts: Artifacts, digest: str, name: str, range: str | None) -> Response:
    """The response with one file of an artifact, or with its end for a ``Range`` header ``bytes=N-``. Blocks. Raises
    :class:`NotFound`."""
    shard = artifacts.shard(digest, name)
    found = RANGE.fullmatch(range or "")
    start = int(found[1]) if found else 0
    headers = {"Content-Length": str(max(0, shard.size - start)), "Accept-Ranges": "bytes"}
    if start >= shard.size > 0:
        return Response(status_code=416, headers={"Content-Range": f"bytes */{shard.size}"})
    if found:
        headers["Content-Range"] = f"bytes {start}-{shard.size - 1}/{shard.size}"
    held = ExitStack()
    content = held.enter_context(artifacts.reading(digest, shard, start))

    def chunks() -> Iterator[bytes]:
        with held:
            yield from content

    return Stream(chunks(), 206 if found else 200, headers, media_type="application/octet-stream")


def _chunks(shards: list[Shard], files: list[Iterator[bytes]], held: ExitStack, created: float) -> Iterator[bytes]:
    with held:
        for shard, content in zip(shards, files, strict=True):
            header = tarfile.TarInfo(shard.name)
            header.size, header.mtime, header.mode = shard.size, int(created), 0o644
            yield header.tobuf(tarfile.USTAR_FORMAT)
            yield from content
            yield bytes(_padding(shard.size))
        yield bytes(1024)


def _padding(size: int) -> int:
    return -size % 512


@contextmanager
def unpack(path: Path) -> Iterator[dict[str, Iterator[bytes]]]:
    """The files of an uploaded PEFT folder by name, in pieces, once they are judged. Raises :class:`UserError` with the
    reason if they are not usable."""
    try:
        with tarfile.open(path, mode="r:") as archive:  # a compressed one could have any size
            members = _members(archive, path.stat().st_size)
            missing = [name for name in ADAPTER_FILES if name not in members]
            if missing:
                raise UserError(
                    f"adapter: the archive has no {' and no '.join(missing)}; send a folder that PEFT saved"
                )
            config, weights = (members[name] for name in ADAPTER_FILES)
            if config.size > CONFIG_BYTES:
                raise UserError(f"adapter: {CONFIG_FILE} is larger than {CONFIG_BYTES} bytes")
            with path.open("rb") as file:  # a regular member is one range of the archive
                for read in (partial(read_lora, b"".join(_content(archive, config))), check_finite):
                    file.seek(weights.offset_data)
                    read(file, weights.size)
            yield {name: _content(archive, member) for name, member in members.items()}
    except BROKEN as error:
        raise UserError(
            f"adapter: the body is not a tar archive ({error}); send the PEFT folder as a tar, not compressed"
        ) from None


def _members(archive: tarfile.TarFile, size: int) -> dict[str, tarfile.TarInfo]:
    """The adapter's files in an archive of ``size`` bytes."""
    members: dict[str, tarfile.TarInfo] = {}
    for number, member in enumerate(archive, 1):
        name = member.name.rsplit("/", 1)[-1]
        _check_member(member, name, number, size)
        if name in ADAPTER_FILES:
            if name in members:
                raise tarfile.ReadError(f"it has {name} twice")
            members[name] = member
    return members


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[bytes]:
    extracted = archive.extractfile(member)
    assert extracted is not None  # a regular file has content
    while chunk := extracted.read(CHUNK_BYTES):
        yield chunk


def _check_member(member: tarfile.TarInfo, name: str, number: int, limit: int) -> None:
    """Raises :class:`tarfile.ReadError` for a member that would make reading take more time or memory than the archive
    has bytes, and for an adapter file that is not a regular file."""
    if number > MAX_MEMBERS:
        raise tarfile.ReadError(f"it has more than {MAX_MEMBERS} files")
    shown = name if name in ADAPTER_FILES else f"file {number}"  # other names may have any content and length
    if member.size > limit:
        raise tarfile.ReadError(f"{shown} is larger than the archive")
    if member.size < 0:  # the same bytes would be read again and again
        raise tarfile.ReadError(f"{shown} has a negative size")
    if member.issparse():  # its holes are read as zeros that were not sent
        raise tarfile.ReadError(f"{shown} is sparse")
    if name in ADAPTER_FILES and not member.isreg():
        raise tarfile.ReadError(f"{shown} is not a regular file")
