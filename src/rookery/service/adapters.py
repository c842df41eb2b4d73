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
from rookery.storage.artifacts import Artifacts
from rookery.wire import Manifest, Shard

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""A PEFT folder: what a version's download holds, and what an upload must bring."""

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
            for member in archive:
                name = member.name.rsplit("/", 1)[-1]
                if name in ADAPTER_FILES and member.isreg():
                    if member.size > len(content):  # a sparse file: its holes are read as zeros
                        raise tarfile.ReadError(f"{name} is larger than the archive")
                    extracted = archive.extractfile(member)
                    assert extracted is not None  # a regular file has content
                    files[name] = extracted.read()
    except (tarfile.TarError, EOFError, OSError) as error:
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
