"""The artifacts that lie on this machine: ``adapters/<hash>``, shared by all its workers.

Promises:

* A file appears whole, under its name, or not at all: it is written as a private ``.part`` and renamed.
* Bytes on disk are hashed again before this process first uses them.
* The cache stays below its bound: folders not used for longest go first, never one that a caller has pinned. Nothing is
  made in order to remove something: that works on a full disk.
* What a process that no longer lives left half-written is removed by the next.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil

from rookery import protocol

TRAINER_STATE = "trainer_state.safetensors"
"""The one shard that generating does not need."""

ADAPTERS = "adapters"
"""The folder for it in a machine's cache."""

MANIFEST = "manifest.json"

MARK = ".adapter"
"""Present in a cached folder that holds all that generating needs. No shard's name begins with a dot."""

RECENT_SECONDS = 60.0
"""Folders used this recently, perhaps by another worker of the machine, are not evicted."""


class AdapterCache:
    """``root`` holds one folder per artifact. Belongs to the I/O thread; hashing and removing run in helper threads."""

    def __init__(self, root: Path, cap_bytes: int) -> None:
        self._root = root
        self._cap_bytes = cap_bytes
        self._verified: set[Path] = set()
        self._pins: Counter[str] = Counter()
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)

    def folder(self, digest: str) -> Path:
        """Where an artifact lies, if it does."""
        return self._root / digest

    def here(self) -> list[str]:
        """Hashes of the artifacts whose adapter lies in the cache."""
        return [folder.name for folder in _artifacts(self._root) if (folder / MARK).exists()]

    @contextmanager
    def pinned(self, digest: str) -> Iterator[None]:
        """The artifact is not removed within."""
        self._pins[digest] += 1
        try:
            yield
        finally:
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]

    # --- in ---------------------------------------------------------------------------------------------------------

    def wanted(self, folder: Path) -> None:
        """``folder``, if it is here, is looked into now: another worker of the machine leaves it alone meanwhile."""
        with suppress(FileNotFoundError):
            os.utime(folder)

    async def intact(self, path: Path, digest: str) -> bool:
        """Whether a shard that is here has the SHA-256 ``digest``."""
        if path in self._verified or await asyncio.to_thread(sha256, path) == digest:
            self._verified.add(path)
            return True
        return False

    def take(self, part: Path, path: Path) -> None:
        """``part``, whose hash is right, becomes the shard ``path``."""
        part.rename(path)
        self._verified.add(path)

    def complete(self, folder: Path) -> None:
        """All that generating needs is in ``folder``, and is used now."""
        (folder / MARK).touch()
        os.utime(folder)

    def aside(self) -> Path:
        """A new folder of this process's own, which no one takes for an artifact."""
        folder = self._hidden()
        folder.mkdir(0o700)
        return folder

    def _hidden(self) -> Path:
        """A name of this process's own: of what is being made, or removed."""
        return self._root / f".{os.getpid()}.{uuid.uuid4().hex}"

    def keep(self, manifest: protocol.Manifest, aside: Path) -> None:
        """What generating needs of the files in ``aside`` becomes the artifact ``manifest``."""
        folder = self._root / manifest.hash
        folder.mkdir(exist_ok=True)
        for shard in manifest.shards:
            if shard.name != TRAINER_STATE:
                self.take(aside / shard.name, folder / shard.name)
        write_whole(folder / MANIFEST, msgspec.json.encode(manifest))
        (folder / MARK).touch()

    # --- out --------------------------------------------------------------------------------------------------------

    def forget(self, digest: str) -> None:
        """Nothing will name this artifact again."""
        if not self._pins[digest]:
            self._remove(self._root / digest)

    def _remove(self, folder: Path) -> asyncio.Future[None]:
        """Gone at once; its bytes are freed in a thread, by when the answer is done."""
        gone = self._hidden()
        with suppress(FileNotFoundError):  # another worker of this machine was faster
            folder.rename(gone)
        self._verified = {path for path in self._verified if path.parent != folder}
        return asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, gone, True)

    async def evict(self, *, full: bool = False) -> None:
        """Remove what has not been used for longest while there is too much: while there is anything, where the disk is
        ``full``."""
        folders = await asyncio.to_thread(_survey, self._root)
        total = sum(size for _, size, _ in folders)
        cap, before = 0 if full else self._cap_bytes, time.time() - RECENT_SECONDS
        freed: list[asyncio.Future[None]] = []
        for folder, size, used in sorted(folders, key=lambda entry: entry[2]):
            if total <= cap or used > before:
                break
            if not self._pins[folder.name]:
                freed.append(self._remove(folder))
                total -= size
        await asyncio.gather(*freed)


def sha256(path: Path) -> str:
    """Of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def part_of(path: Path) -> Path:
    """Where this process writes what will become ``path``: workers of one machine share the cache."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def write_whole(path: Path, content: bytes) -> None:
    """Make the file ``path``, and its folder where there is none."""
    path.parent.mkdir(exist_ok=True)
    part = part_of(path)
    part.write_bytes(content)
    part.rename(path)


def _artifacts(root: Path) -> Iterator[Path]:
    """Folders that are no process's own."""
    return (folder for folder in root.iterdir() if not folder.name.startswith("."))


def _survey(root: Path) -> list[tuple[Path, int, float]]:
    """(folder, bytes, time of last use) of every cached artifact."""
    found = []
    for folder in _artifacts(root):
        try:
            found.append((folder, sum(e.stat().st_size for e in os.scandir(folder)), folder.stat().st_mtime))
        except FileNotFoundError:  # another worker of this machine removes it
            continue
    return found


def _sweep(root: Path) -> None:
    """Remove what processes that no longer live left half-written."""
    for part in root.glob("*/*.part"):
        if not psutil.pid_exists(int(part.name.split(".")[-2])):
            part.unlink(missing_ok=True)
    for aside in root.glob(".*.*"):
        if not psutil.pid_exists(int(aside.name.split(".")[1])):
            shutil.rmtree(aside, ignore_errors=True)
