"""Artifacts on this machine's disk, ``adapters/<hash>``, shared by all its workers; and reports about them.

Promises:

* A file appears whole, under its name, or not at all: it is written as a private ``.part`` file and renamed. No other
  process, of this machine or of another container, writes to the same ``.part`` file.
* Bytes on disk are hashed again before this process first uses them, and again where it has used many others since.
* The cache stays below its limit: the least recently used folders are evicted first, those that a process of the
  machine retains after all others, those that one has pinned never. Eviction creates no file, so it works on a full
  disk.
* Half-written and private files of a process that has died are deleted by the next one that begins, or looks
  (:meth:`AdapterCache.delete_private_leftovers`). They are locked (``flock``) while their process uses them: process
  ids mean nothing to the processes of another container, each of which may be process 1.
* The folder is readable by its owner only, because it holds the adapters of all tenants. A folder that an earlier
  release created with wider permissions is corrected.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import uuid
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from cachetools import LRUCache

from rookery import protocol
from rookery.errors import UserError

TRAINER_STATE = "trainer_state"
"""First part of the names of the shards that generation does not need."""

ADAPTERS = "adapters"
"""Name of the cache's folder within a machine's cache folder."""

MANIFEST = "manifest.json"

COMPLETE = ".adapter"
"""Marker file of a folder that holds all that generation needs. No shard's name begins with a dot."""

VERIFIED = 1024
"""Artifacts whose hashed files are known: of one that is not, they are hashed again, in milliseconds. The disk may have
hundreds of thousands."""

RETAINED = "retained"
"""File in a private folder of a process: the hashes of the artifacts that it retains."""

RECENT_SECONDS = 60.0
"""Folders used this recently, perhaps by another worker of the machine, are not evicted."""


def is_state(shard: str) -> bool:
    """Whether only a trainer needs the shard of this name."""
    return shard.startswith(f"{TRAINER_STATE}.")


class AdapterCache:
    """``root`` holds one folder per artifact. Belongs to the I/O thread; hashing and deletion run in helper threads."""

    def __init__(self, root: Path, capacity_bytes: int) -> None:
        """Raises ``UserError`` if ``root`` belongs to another user and is open to others."""
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._id = uuid.uuid4().hex
        """Of this cache among all that share the folder."""
        self._verified: LRUCache[Path, set[str]] = LRUCache(VERIFIED)
        """The names of the hashed files, by folder."""
        self._pins: Counter[str] = Counter()
        self._locks: dict[str, int] = {}
        """By hash, the descriptors that lock the folders of pinned artifacts, once these exist: other processes of the
        machine do not evict them."""
        self._private: dict[Path, int] = {}
        """This process's private folders, and the descriptors that lock them."""
        self._discarded: set[str] = set()
        """Pinned artifacts that are deleted when their last pin ends."""
        self._retained: frozenset[str] = frozenset()
        self._retainer: Path | None = None
        """The private folder of the file :data:`RETAINED`, while there are any."""
        self.make()
        if root.stat().st_mode & 0o077:
            try:
                root.chmod(0o700)
            except PermissionError:
                raise UserError(
                    f"the adapter cache {root} is open to other users and belongs to another one; "
                    "set ROOKERY_CACHE to a folder of your own"
                ) from None
        self.delete_private_leftovers()
        found = root.stat()
        self.identity = f"{found.st_dev:x}.{found.st_ino:x}"
        """Equal in all processes of this machine that share the cache, in containers too."""

    def make(self) -> None:
        """The folder exists on return. A user may delete a cache at any time: what is missing is pulled again."""
        self._root.mkdir(0o700, parents=True, exist_ok=True)

    def delete_private_leftovers(self) -> None:
        """Delete the private folders and half-written files that no living process has locked. Blocks."""
        for private in self._root.glob(".*.*"):
            with suppress(OSError), _unlocked(private, os.O_RDONLY | os.O_DIRECTORY):  # else it is locked, or gone
                shutil.rmtree(private, ignore_errors=True)
        for part in self._root.glob("*/*.*.part"):
            with suppress(OSError), _unlocked(part, os.O_RDWR):
                part.unlink()

    def folder(self, digest: str) -> Path:
        """The artifact's folder, which may not exist."""
        return self._root / digest

    def complete_adapters(self) -> list[str]:
        """Hashes of the artifacts whose adapter is complete in the cache; none of one that is gone or unreadable."""
        with suppress(OSError):
            return [folder.name for folder in _artifacts(self._root) if (folder / COMPLETE).exists()]
        return []

    def is_complete(self, digest: str) -> bool:
        """Whether this artifact's adapter is."""
        return (self._root / digest / COMPLETE).exists()

    @contextmanager
    def pinned(self, digest: str) -> Iterator[None]:
        """No process of the machine evicts the artifact within this context."""
        self._pins[digest] += 1
        try:
            self.lock(digest)
            yield
        finally:
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]
                if (lock := self._locks.pop(digest, None)) is not None:
                    os.close(lock)
                if digest in self._discarded:
                    self._discarded.remove(digest)
                    self._delete(self._root / digest)

    def lock(self, digest: str) -> None:
        """The folder of the artifact, which is pinned, may exist now: keep other processes from its eviction. One that
        cannot be opened cannot be read either, which is reported then."""
        if digest in self._locks:
            return
        with suppress(OSError):
            if (lock := _lock(self._root / digest, os.O_RDONLY | os.O_DIRECTORY)) is not None:
                self._locks[digest] = lock

    def retain(self, hashes: Iterable[str]) -> None:
        """This worker is the last reserved holder of these artifacts: all processes of the machine evict them last.
        Replaces the set given before."""
        self._retained = frozenset(hashes)
        with suppress(OSError):  # such as a full disk: other processes do not know them
            if self._retained and self._retainer is None:
                self._retainer = self.staging_folder()
            if self._retained and self._retainer is not None:
                write_atomically(self._retainer / RETAINED, "\n".join(sorted(self._retained)).encode())
        if not self._retained and self._retainer is not None:
            self.delete_staging(self._retainer)
            self._retainer = None

    # --- insertion --------------------------------------------------------------------------------------------------

    def touch(self, folder: Path) -> None:
        """Mark ``folder``, if it exists, as used now, so that other workers of the machine do not evict it. The cache
        may be read-only: what is in it is used all the same."""
        with suppress(OSError):
            os.utime(folder)

    async def verify(self, path: Path, digest: str) -> bool:
        """Whether the existing shard ``path`` has the SHA-256 ``digest``."""
        known = path.name in self._verified.get(path.parent, ())
        if known or await asyncio.to_thread(sha256, path) == digest:
            self._verified.setdefault(path.parent, set()).add(path.name)
            return True
        return False

    def part_of(self, path: Path) -> Path:
        """The private file for the download of ``path``, :func:`locked` while it is written."""
        return path.with_name(f"{path.name}.{self._id}.part")

    def insert(self, part: Path, path: Path) -> None:
        """Rename ``part``, whose hash is verified, to the shard ``path``."""
        part.rename(path)
        self._verified.setdefault(path.parent, set()).add(path.name)

    def mark_complete(self, folder: Path) -> None:
        """All that generation needs is in ``folder``; it counts as used now."""
        if not self.is_complete(folder.name):
            (folder / COMPLETE).touch()
        self.touch(folder)

    def staging_folder(self) -> Path:
        """A new private folder of this process, which is no artifact, until :meth:`delete_staging`."""
        self.make()
        folder, lock = private_folder(self._root)
        self._private[folder] = lock
        return folder

    def delete_staging(self, folder: Path) -> None:
        """Delete a folder of :meth:`staging_folder`. Blocks."""
        shutil.rmtree(folder, ignore_errors=True)
        if (lock := self._private.pop(folder, None)) is not None:
            os.close(lock)

    def insert_staged(self, manifest: protocol.Manifest, staging: Path) -> None:
        """Make the files of ``staging`` that generation needs the artifact ``manifest``. Another process of the machine
        may do the same."""
        folder = self._root / manifest.hash
        folder.mkdir(exist_ok=True)
        for shard in manifest.shards:
            if not is_state(shard.name):
                self.insert(staging / shard.name, folder / shard.name)
        write_atomically(folder / MANIFEST, msgspec.json.encode(manifest))
        (folder / COMPLETE).touch()

    # --- eviction ---------------------------------------------------------------------------------------------------

    def discard(self, digest: str) -> None:
        """Delete an artifact that nothing will name again, when its last pin ends; one that another process has pinned
        is left to that process, which learns of it too."""
        if self._pins[digest]:
            self._discarded.add(digest)
        else:
            self._delete(self._root / digest)

    def keep(self, digest: str) -> None:
        """Work names the artifact again."""
        self._discarded.discard(digest)

    async def evict(self, *, disk_full: bool = False) -> list[str]:
        """Delete the least recently used artifacts while the cache exceeds its capacity; with ``disk_full``, all that
        are neither pinned nor recently used. Those with a time that is yet to come were last used before the clock was
        set back: they count as the oldest. Returns their hashes."""
        folders = await asyncio.to_thread(_sizes, self._root)
        total = sum(size for _, size, _ in folders)
        capacity, now = 0 if disk_full else self._capacity_bytes, await asyncio.to_thread(_present, self._root)
        retained = self._retained | await asyncio.to_thread(_retained, self._root)
        deletions: dict[str, asyncio.Future[None]] = {}

        def order(entry: tuple[Path, int, float]) -> tuple[bool, bool, float]:
            folder, _, used = entry
            return folder.name in retained, used < now + RECENT_SECONDS, used

        for folder, size, used in sorted(folders, key=order):
            if total <= capacity:
                break
            if abs(now - used) < RECENT_SECONDS or self._pins[folder.name]:
                continue
            if (deletion := self._delete(folder)) is not None:
                deletions[folder.name] = deletion
                total -= size
        await asyncio.gather(*deletions.values())
        return list(deletions)

    def _delete(self, folder: Path) -> asyncio.Future[None] | None:
        """Hide the folder at once; the future completes when a thread has freed its bytes. None where another process
        has pinned it."""
        hidden = _private_path(self._root)
        try:
            with _unlocked(folder, os.O_RDONLY | os.O_DIRECTORY):
                folder.rename(hidden)
        except FileNotFoundError:  # another worker of this machine has deleted it
            pass
        except BlockingIOError:
            return None
        except OSError:  # a file system without locks
            folder.rename(hidden)
        self._verified.pop(folder, None)
        return asyncio.get_running_loop().run_in_executor(None, shutil.rmtree, hidden, True)


class CacheEvents:
    """Reports to the controller: adapters that arrived, that left, and those that could not be pulled. Each is sent
    once per connection. Belongs to the I/O thread."""

    def __init__(self) -> None:
        self.pending = asyncio.Event()
        """Set while :meth:`take` has something to return."""
        self._reported: set[str] = set()
        """Hashes that the present connection's controller knows to be cached."""
        self._arrived: list[str] = []
        self._evicted: list[str] = []
        self._failed: dict[str, str] = {}
        self._handed: list[str] = []

    def reset(self, reported: Iterable[str]) -> None:
        """A new connection has begun; its ``Hello`` names the hashes ``reported``."""
        self._reported = set(reported)
        self._arrived.clear()
        self._evicted.clear()
        self._failed.clear()
        self._handed.clear()

    def report_again(self, hashes: Iterable[str]) -> None:
        """Report these hashes when they arrive even if they were reported before."""
        self._reported.difference_update(hashes)

    def on_arrived(self, digest: str) -> None:
        """The adapter is complete in the cache."""
        if digest not in self._reported:
            self._reported.add(digest)
            self._arrived.append(digest)
            self.pending.set()

    def on_handed(self, digest: str) -> None:
        """The version is here before it is committed."""
        self._handed.append(digest)
        self.pending.set()

    def on_failed(self, digest: str, error: str) -> None:
        """A pull of the artifact has failed."""
        self._failed[digest] = error
        self.pending.set()

    def on_evicted(self, digest: str, *, report: bool = False) -> None:
        """The adapter has left the cache; ``report``: to make room, which the controller does not know yet."""
        if report and digest in self._reported and digest not in self._arrived:
            self._evicted.append(digest)
            self.pending.set()
        self._reported.discard(digest)
        self._arrived = [one for one in self._arrived if one != digest]

    def take(self) -> list[protocol.EpochMessage]:
        """Messages for the reports that have not been sent, and clear them."""
        self.pending.clear()
        messages: list[protocol.EpochMessage] = [
            protocol.PullFailed(hash=digest, error=error) for digest, error in self._failed.items()
        ]
        if self._evicted:
            messages.append(protocol.AdaptersEvicted(hashes=list(self._evicted)))
        messages += [protocol.HandedOver(hash=digest) for digest in self._handed]
        if self._arrived:  # after the hand-over, which came before the commit
            messages.append(protocol.AdaptersCached(hashes=list(self._arrived)))
        self._arrived.clear()
        self._evicted.clear()
        self._failed.clear()
        self._handed.clear()
        return messages


def sha256(path: Path) -> str:
    """The hash of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def private_folder(root: Path) -> tuple[Path, int]:
    """A new private folder in the cache ``root``, and the descriptor that locks it until it is closed."""
    while True:
        folder = _private_path(root)
        folder.mkdir(0o700)
        if (lock := _lock(folder, os.O_RDONLY | os.O_DIRECTORY)) is not None:
            return folder, lock


class PrivateFolder:
    """A new private folder in the cache ``root``, at ``path``: no process deletes it as a leftover before
    :meth:`close`, which deletes it, or the end of this object."""

    def __init__(self, root: Path) -> None:
        root.mkdir(0o700, parents=True, exist_ok=True)
        self.path, lock = private_folder(root)
        self.close = weakref.finalize(self, _delete_private, self.path, lock)


def _delete_private(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _private_path(root: Path) -> Path:
    """A new path for something that this process creates or deletes; its name carries the process id."""
    return root / f".{os.getpid()}.{uuid.uuid4().hex}"


@contextmanager
def locked(part: Path) -> Iterator[None]:
    """The private file ``part``, created if it does not exist, is no leftover within this context."""
    while (lock := _lock(part, os.O_RDWR | os.O_CREAT)) is None:
        pass
    try:
        yield
    finally:
        os.close(lock)


def _lock(path: Path, flags: int) -> int | None:
    """A descriptor that locks ``path``; None if another process has deleted it before."""
    try:
        lock = os.open(path, flags)
    except FileNotFoundError:
        if flags & os.O_CREAT:  # its folder does not exist
            raise
        return None
    try:
        with suppress(OSError):  # a file system without locks: leftovers stay there
            fcntl.flock(lock, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


@contextmanager
def _unlocked(path: Path, flags: int) -> Iterator[None]:
    """Raises ``BlockingIOError`` if a process has locked ``path``, and other errors, such as where it does not exist;
    none can lock it within this context."""
    lock = os.open(path, flags)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


def write_atomically(path: Path, content: bytes) -> None:
    """Create the file ``path``, and its folder if needed."""
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with locked(part):
            part.write_bytes(content)
            part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def link_shard(source: Path, part: Path) -> None:
    """Make ``part``, which may exist, another name of the file ``source``."""
    part.unlink(missing_ok=True)
    os.link(source, part)


def _retained(root: Path) -> frozenset[str]:
    """The hashes of the artifacts that processes of the machine retain."""
    found = list[str]()
    for path in root.glob(f".*.*/{RETAINED}"):
        with suppress(FileNotFoundError):  # the process retains none any more
            found += path.read_text(encoding="utf-8").split()
    return frozenset(found)


def _artifacts(root: Path) -> Iterator[Path]:
    return (folder for folder in root.iterdir() if not folder.name.startswith("."))


def _present(root: Path) -> float:
    """The time by the clock that the file system gives its files, which may be another machine's."""
    os.utime(root)
    return root.stat().st_mtime


def _sizes(root: Path) -> list[tuple[Path, int, float]]:
    """(folder, bytes, time of last use) of every cached artifact."""
    found = []
    for folder in _artifacts(root):
        with suppress(FileNotFoundError):  # another worker of this machine deletes it
            found.append((folder, sum(e.stat().st_size for e in os.scandir(folder)), folder.stat().st_mtime))
    return found
