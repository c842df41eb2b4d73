"""Artifacts: folders of hashed files, named by the hash of their manifest, in one local folder. Those of an object
store (:mod:`rookery.storage.object_artifacts`) have the same methods.

* An artifact that :meth:`Artifacts.open` finds is whole: it is written to a staging folder, every file and the manifest
  are fsynced, and one rename makes it visible. A crash at any point leaves either all of it or a leftover that
  :meth:`Artifacts.sweep` removes.
* It never changes afterwards. Committing the same content again is no error and repairs a damaged copy.
* A full disk raises :class:`~rookery.errors.StorageFull`; the staging it happened in can only be abandoned.
* Permissions are not decided here: a hash is a name, not a permission (the database knows the owners).
* Every failure has the meaning that :mod:`rookery.storage.place` gives it: what is absent is never called corrupt.
* An artifact that the database does not name is deleted only when it was found so for some time: a database that is
  older than the artifacts for a moment, as a wrong copy of it, loses nothing. That time is the one for which services
  ran here (:meth:`Artifacts.ran`): a wall clock that is set loses nothing either.

Layout: ``<root>/<hash>/{manifest.json, shards…}``; ``<root>/owner``, the owner's mark; ``<root>/holder``, the service
that uses it; ``<root>/.staging/<random>/`` while being written; ``<root>/.orphans/ran``, the seconds for which services
ran here while there were artifacts without a name; ``<root>/.orphans/<hash>``, those when nothing named the artifact
for the first time.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from rookery.errors import (
    Conflict,
    CorruptArtifact,
    IncompleteArtifact,
    NotFound,
    RookeryError,
    StorageFull,
    Unavailable,
    UserError,
    shortage,
    shortages,
    unusable,
)
from rookery.folders import probe_writes, write_durably
from rookery.protocol import Manifest, Shard, manifest_of
from rookery.storage.place import (
    DISK,
    HOLDER,
    OWNER,
    Lease,
    Owner,
    admit,
    away,
    first_line,
    folder_name,
    understood,
)

MANIFEST = "manifest.json"

MAX_ARTIFACT_BYTES = 64 << 30
"""Of all shards together. An upload ticket is given for one adapter with its trainer state; this is far above the
largest, and keeps a broken or hostile worker from filling the disk."""

READ_BYTES = 1 << 20
"""Bytes of a file that are read at once: a switch of threads costs more than reading less."""

RESERVED_SHARE = 0.05
"""Largest part of a disk that uploads leave free for commits."""

RESERVE_CHECKED = 8 << 20
"""Bytes of a file after which the free room of the disk is read again."""

HOLDER_BYTES = 4096
"""Of the file ``holder``, which is written in its place: a disk that is full takes that."""

NO_FOLDER_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)
"""Error numbers of a file system that writes no folder to its disk on request."""

RAN = "ran"
"""Among the marks of orphans: for how many seconds services ran."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_HASH = re.compile(r"[0-9a-f]{64}")


Writing = Callable[[], AbstractContextManager[None]]


class Artifacts:
    """The artifacts below ``root``, which is made if missing. Methods block and may be called from any thread."""

    remote = False
    """Whether calls wait for a network."""

    _kinds: tuple[type[Exception], ...] = ()
    """Errors of the place besides ``OSError``."""

    def __init__(self, root: Path, max_bytes: int = MAX_ARTIFACT_BYTES, make: bool = True) -> None:
        """Without ``make`` nothing is written until :meth:`claim`."""
        self.root = root
        self._staging = root / ".staging"
        self._orphans = root / ".orphans"
        self._max_bytes = max_bytes
        self._owner: str | None = None
        """The identity of the owner; None before :meth:`claim`."""
        self._lease: Lease | None = None
        """This service's lease; None before :meth:`hold`, and for a command that only reads."""
        self._holding = threading.Lock()
        self._ran: float | None = None
        """The seconds for which services ran, where there are marked orphans."""
        if make:
            self._make()

    @property
    def where(self) -> str:
        """The place, as its owner remembers it."""
        return folder_name(self.root)

    def claim(self, owner: Owner) -> None:
        """Check that the place belongs to the database ``owner``, and mark it if it is new. Raises :class:`UserError`
        for a place of another one, or one that cannot be used, :class:`Unavailable` and :class:`StorageFull` for one
        that may be usable later."""
        try:
            self.inspect(owner)
            self._make()
            with tempfile.TemporaryFile(dir=self._staging):
                pass
            if self._mark() is None:
                assert owner.identity is not None
                write_durably(self.root / OWNER, owner.identity)
                _sync_folder(self.root)
        except OSError as error:
            if (full := shortage(error, DISK)) is not None:
                raise full from None
            raise unusable(error)(
                f"the artifacts at {self.root} cannot be used ({error.strerror or error}); make the folder readable and"
                " writable, or set ROOKERY_ARTIFACTS_URL to one that is"
            ) from None
        self._owner = owner.identity

    def inspect(self, owner: Owner) -> None:
        """As :meth:`claim`, without writing. Raises also ``OSError``."""
        admit(owner, self.where, self._mark(), self._found)

    def hold(self, lease: Lease) -> bool:
        """Make the service of ``lease`` the holder of the claimed place, or renew that; False while another service
        may still be that: ask again soon. Raises :class:`~rookery.storage.place.PlaceInUse` if it is,
        :class:`Unavailable`."""
        with self._holding, understood(self._check_mark, self._kinds):
            lease.answered = False
            self._check_mark()
            takes = lease.takes(self._holder(), self.where)
            if takes:
                self._write_holder(lease.renewed())
                self._lease = lease
            lease.answered = True
            return takes

    def release(self) -> None:
        """End the lease: the next service need not watch it. The file stays where the place did not answer, which
        could take long."""
        lease = self._lease
        if lease is None:
            return
        lease.released = True
        if lease.answered:
            with self._holding, suppress(RookeryError), understood(self._check_mark, self._kinds):
                self.check()
                self._remove_holder()

    def _holder(self) -> bytes:
        """The content of the file ``holder``; empty without one."""
        try:
            return (self.root / HOLDER).read_bytes()
        except FileNotFoundError:
            return b""

    def _write_holder(self, content: bytes) -> None:
        file = os.open(self.root / HOLDER, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(file, content.ljust(HOLDER_BYTES), 0)
        finally:
            os.close(file)

    def _remove_holder(self) -> None:
        (self.root / HOLDER).unlink(missing_ok=True)

    def check(self) -> None:
        """Raises :class:`ArtifactsAway` if the place is not there now, not its owner's, or another service uses it."""
        self._check_mark()
        if self._lease is None:
            return
        with understood(self._check_mark, self._kinds):
            other = self._lease.other(self._holder())
        if other is not None:
            raise away(f"{self.where} is in use by the service {other.shown}")

    def _check_mark(self) -> None:
        try:
            if self._owner is None:
                self.root.stat()
                return
            mark = self._mark()
        except OSError as error:
            raise away(f"{self.root}: {first_line(error)}") from error
        if mark != self._owner:
            found = "has no owner's mark" if mark is None else "is marked as another database's"
            raise away(f"{self.root} {found}; mount the disk, or restore the file {OWNER}")

    def check_writes(self) -> None:
        """Write some bytes and delete them. Raises :class:`ArtifactsAway`, :class:`StorageFull`,
        :class:`UnreadableArtifact`."""
        with understood(self._check_staging):
            probe_writes(self._staging)

    def check_reserve(self, reserve: int) -> None:
        """Raises :class:`StorageFull` where the disk to which artifacts are written has less than ``reserve`` bytes
        free, and less than :data:`RESERVED_SHARE` of its own, :class:`Unavailable`."""
        if not reserve:
            return
        with understood(self._check_staging):
            disk = shutil.disk_usage(self._staging)
        least = min(reserve, int(disk.total * RESERVED_SHARE))
        if disk.free < least:
            raise StorageFull(
                f"{DISK} has {disk.free} bytes free, of which the service keeps {least} for its commits; free some"
                " space, nothing was half-written"
            )

    def _mark(self) -> str | None:
        try:
            return (self.root / OWNER).read_text(encoding="ascii", errors="replace").strip()
        except FileNotFoundError:
            return None

    def _found(self) -> set[str]:
        try:
            return {entry.name for entry in self.root.iterdir() if _HASH.fullmatch(entry.name)}
        except FileNotFoundError:
            return set()

    def _make(self) -> None:
        with shortages(DISK):
            self._staging.mkdir(mode=0o700, parents=True, exist_ok=True)

    def begin(self) -> Staging:
        """A place to write a new artifact."""
        with understood(self._check_staging):
            self._check_staging()
            self._staging.mkdir(mode=0o700, exist_ok=True)
            return Staging(Path(tempfile.mkdtemp(dir=self._staging)), self, self._max_bytes)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within, files of a staging are written. Raises :class:`Conflict` if it ended meanwhile."""
        try:
            with understood(self._check_staging):
                yield
        except NotFound as error:
            raise Conflict("this artifact was committed or abandoned meanwhile") from error

    def _check_staging(self) -> None:
        """As :meth:`check`, where artifacts are written: without waiting for a network."""
        self.check()

    def open(self, hash: str) -> Manifest:
        """The manifest of a visible artifact; its files are there with their sizes (:meth:`verify` reads them).

        Raises :class:`NotFound`; :class:`IncompleteArtifact` if bytes are absent; :class:`CorruptArtifact` if manifest
        or sizes are not what the hash says; :class:`Unavailable`."""
        return self._whole(hash, _same_size)

    def shard(self, hash: str, name: str) -> Shard:
        """One file of an artifact. Raises :class:`NotFound`, :class:`CorruptArtifact`."""
        for shard in self.open(hash).shards:
            if shard.name == name:
                return shard
        raise NotFound(f"no {name} in artifact {hash}")

    @contextmanager
    def reading(self, hash: str, shard: Shard, start: int = 0) -> Iterator[Iterator[bytes]]:
        """The content of a file from byte ``start`` on, in pieces. It arrives whole, also if the artifact is deleted
        meanwhile. Raises :class:`NotFound`."""
        with understood(self.check, absent=f"artifact {hash} was deleted meanwhile"):
            file = (self._folder(hash) / shard.name).open("rb")
        with file:
            file.seek(start)

            def read() -> bytes:
                with understood(self.check):
                    return file.read(READ_BYTES)

            yield iter(read, b"")

    def path(self, hash: str, shard: str) -> Path:
        """A local path of one file, for other processes of this machine. Raises :class:`NotFound`,
        :class:`CorruptArtifact`."""
        return self._folder(hash) / self.shard(hash, shard).name

    def verify(self, hash: str) -> Manifest:
        """Read and hash everything. Raises the errors of :meth:`open`, which name the bad file."""
        return self._whole(hash, _same_bytes)

    def _whole(self, hash: str, check: Callable[[Path, Shard], None]) -> Manifest:
        """The manifest, once ``check(path, shard)`` has passed for every file. A folder that is deleted or replaced
        meanwhile is checked again."""
        folder = self._folder(hash)
        with understood(self.check):
            while (there := _identity(folder)) is not None:
                try:
                    manifest = decode_manifest((folder / MANIFEST).read_bytes(), hash)
                    for shard in manifest.shards:
                        check(folder / shard.name, shard)
                except FileNotFoundError as error:
                    if _identity(folder) == there:
                        raise IncompleteArtifact(f"artifact {hash}: {Path(error.filename).name} is missing") from None
                else:
                    return manifest
            raise NotFound(f"no artifact {hash}")

    def delete(self, hash: str) -> None:
        """Make it invisible at once, then free its bytes; a missing one is no error. Raises :class:`Unavailable`."""
        trash = self._staging / f"{hash}.{secrets.token_hex(8)}"  # nothing is created first: the disk may be full
        with understood(self.check):
            self.check()
            with suppress(FileNotFoundError):
                self._folder(hash).rename(trash)
                _sync_folder(self.root)
                shutil.rmtree(trash)

    def link(self, hash: str, folder: Path) -> None:
        """Give the artifact's files a second name in the new ``folder``: hard links, or copies where the disk has none.
        Raises :class:`NotFound`, :class:`CorruptArtifact`."""
        shards = self.open(hash).shards
        with shortages(DISK):
            folder.mkdir(mode=0o700)
            try:
                for name in (MANIFEST, *(shard.name for shard in shards)):
                    _link_or_copy(self._folder(hash) / name, folder / name)
            except FileNotFoundError:
                shutil.rmtree(folder)
                raise NotFound(f"artifact {hash} was deleted meanwhile") from None

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder on the artifacts' disk within; :meth:`sweep` removes it after a crash."""
        with understood(self.check):
            folder = Path(tempfile.mkdtemp(dir=self._staging))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def hashes(self) -> set[str]:
        """Names of all visible artifacts. Raises :class:`Unavailable`: an empty set means that there is none."""
        with understood(self.check):
            found = self._found()
            self.check()
            return found

    def sweep(self) -> int:
        """Remove the half-written artifacts that a crash left; returns their number. Only at start: it would also
        remove those that are being written now."""
        with understood(self.check):
            self.check()
            leftovers = list(self._staging.iterdir()) if self._staging.is_dir() else []
            for leftover in leftovers:
                shutil.rmtree(leftover)
            return len(leftovers)

    def prune(self, live: Collection[str], keep: float = 0.0) -> list[str]:
        """Delete every artifact that is not in ``live`` (:func:`~rookery.storage.repositories.versions.live_hashes`)
        and was not while services ran for ``keep`` seconds. Only at start: what is written now is not named yet.
        Returns the hashes of the deleted ones."""
        found, marks = self.hashes(), self._orphan_marks()
        ran = marks.pop(RAN, 0.0)
        for hash in marks.keys() - found.difference(live):
            self._unmark_orphan(hash)
        dead = sorted(found.difference(live))
        old = [hash for hash in dead if not keep or ran - marks.get(hash, ran) >= keep]
        for hash in dead:
            if hash not in old and marks.get(hash, math.inf) > ran:  # a mark from later: what counts the time was lost
                self._mark_orphan(hash, ran)
        for hash in old:
            self.delete(hash)
            if hash in marks:
                self._unmark_orphan(hash)
        self._ran = ran if len(old) < len(dead) else None
        return old

    def ran(self, seconds: float) -> None:
        """The service has run for so many more seconds since :meth:`prune`."""
        if self._ran is not None:
            self._mark_orphan(RAN, self._ran + seconds)
            self._ran += seconds

    def _orphan_marks(self) -> dict[str, float]:
        """The seconds for which services had run when each orphan was first found, by its hash, and until now, as
        :data:`RAN`; none where it cannot be read."""
        with understood(self.check):
            paths = list(self._orphans.iterdir()) if self._orphans.is_dir() else []
            return seconds_of({path.name: path.read_bytes() for path in paths})

    def _mark_orphan(self, name: str, ran: float) -> None:
        with understood(self.check):
            self._orphans.mkdir(mode=0o700, exist_ok=True)
            (self._orphans / name).write_text(str(ran), encoding="ascii")

    def _unmark_orphan(self, name: str) -> None:
        with understood(self.check):
            (self._orphans / name).unlink(missing_ok=True)

    def _folder(self, hash: str) -> Path:
        return self.root / check_hash(hash)

    def publish(self, folder: Path, manifest: Manifest) -> None:
        """Move a complete, synced folder to where it is visible, durably."""
        target = self._folder(manifest.hash)
        self.check()
        try:
            self.verify(manifest.hash)
        except NotFound:
            pass
        except CorruptArtifact:
            self.delete(manifest.hash)
        else:
            shutil.rmtree(folder)
            return
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            shutil.rmtree(folder)  # another thread committed the same content first
        _sync_folder(self.root)


class Staging:
    """An artifact being written. Ends with :meth:`commit` or :meth:`abandon`; as a context manager it abandons an
    uncommitted one."""

    def __init__(self, folder: Path, artifacts: Artifacts, max_bytes: int) -> None:
        self._folder = folder
        self._artifacts = artifacts
        self._shards: dict[str, Shard] = {}
        self._max_bytes = max_bytes
        self.full: StorageFull | Unavailable | None = None
        """The error of a write that found the disk full, or no free file descriptor."""

    def begin(self, name: str, reserve: int = 0) -> ShardWriter:
        """A file to be written piece by piece, which leaves a ``reserve`` of the disk
        (:meth:`Artifacts.check_reserve`). Raises :class:`UserError` for an invalid name."""
        if not _NAME.fullmatch(name) or name.lower() == MANIFEST:
            raise UserError(f"shard {name[:200]!r}: a name is letters, digits, dot, dash, underscore, not {MANIFEST}")
        others = sum(shard.size for shard in self._shards.values() if shard.name != name)
        with self._artifacts.writing():
            check = partial(self._artifacts.check_reserve, reserve)
            room = self._max_bytes - others
            return ShardWriter(self._folder, name, room, self._shards, self._artifacts.writing, check)

    def write(self, name: str, chunks: Iterable[bytes], reserve: int = 0) -> Shard:
        """Writes one file, durable when this returns; a file of the same name is replaced (an upload tried again). It
        leaves a ``reserve`` of the disk as in :meth:`begin`.

        Raises :class:`UserError` for a bad name or too many bytes, :class:`StorageFull`; then nothing of it stays."""
        try:
            with self.begin(name, reserve) as writer:
                for chunk in chunks:
                    writer.write(chunk)
                return writer.finish()
        except (StorageFull, Unavailable) as error:
            self.full = error
            raise

    def path(self, name: str) -> Path:
        """The file of that name, which was written before."""
        return self._folder / self._shards[name].name

    def manifest(self) -> Manifest:
        """The manifest of the files so far. Raises :class:`Conflict` if nothing was written."""
        if not self._shards:
            raise Conflict("an artifact has at least one file")
        return manifest_of(self._shards.values())

    def commit(self) -> Manifest:
        """Makes the artifact visible; it is durable when this returns. Raises :class:`Conflict` if nothing was written,
        :class:`StorageFull`."""
        manifest = self.manifest()
        with self._artifacts.writing():
            with (self._folder / MANIFEST).open("wb") as file:
                file.write(msgspec.json.encode(manifest))
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(self._folder)
            self._artifacts.publish(self._folder, manifest)
        return manifest

    def abandon(self) -> None:
        """Remove the staging folder; after a commit it does nothing. Bytes that another thread writes at this moment
        stay until the next :meth:`Artifacts.sweep`, never visible."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.abandon()


class ShardWriter:
    """One file of a staging, open for writing. As a context manager it removes an unfinished one."""

    def __init__(
        self,
        folder: Path,
        name: str,
        room: int,
        shards: dict[str, Shard],
        writing: Writing,
        check_reserve: Callable[[], None],
    ) -> None:
        self._check_reserve = check_reserve
        self._unchecked = RESERVE_CHECKED
        """Bytes that were written since the free room of the disk was read."""
        self._target = folder / name
        self._room = room
        self._writing = writing
        self._shards = shards
        self._digest = hashlib.sha256()
        self._size = 0
        handle, part = tempfile.mkstemp(prefix=".", dir=folder)  # the dot: never a shard's name
        self._file = os.fdopen(handle, "wb")
        self._part = Path(part)

    def write(self, chunk: bytes) -> None:
        """Raises :class:`UserError` if the artifact grows too large, :class:`StorageFull`."""
        self._size += len(chunk)
        self._unchecked += len(chunk)
        if self._unchecked >= RESERVE_CHECKED:
            self._check_reserve()
            self._unchecked = 0
        if self._size > self._room:
            raise UserError(f"shard {self._target.name}: the artifact would exceed its limit of bytes")
        self._digest.update(chunk)
        with self._writing():
            self._file.write(chunk)

    def finish(self) -> Shard:
        """The file is whole and durable. Raises :class:`StorageFull`, or :class:`Conflict` if the staging ended."""
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._part.replace(self._target)
        shard = Shard(name=self._target.name, size=self._size, sha256=self._digest.hexdigest())
        self._shards[shard.name] = shard
        return shard

    def close(self) -> None:
        """Remove the file unless it is finished."""
        with suppress(OSError):  # closing flushes bytes that a full disk has refused already; that was reported
            self._file.close()
        with suppress(OSError):
            self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Place(NamedTuple):
    """Where artifacts are kept, as the settings ``artifacts_url`` and ``artifacts_endpoint`` say."""

    url: str = ""
    endpoint: str = ""


DATA_FOLDER = Place()
"""The artifacts in the data folder."""


def check_hash(hash: str) -> str:
    """``hash``, which names an artifact. Raises :class:`NotFound` for any other text."""
    if not _HASH.fullmatch(hash):
        raise NotFound("no such artifact: a hash is 64 hexadecimal digits")
    return hash


def decode_manifest(content: bytes, hash: str) -> Manifest:
    """Raises :class:`CorruptArtifact` unless ``content`` is a manifest with that hash."""
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise CorruptArtifact(f"artifact {hash}: {MANIFEST} cannot be read") from None
    if manifest != manifest_of(manifest.shards) or manifest.hash != hash:
        raise CorruptArtifact(f"artifact {hash}: {MANIFEST} does not have the hash that names it")
    return manifest


def check_size(hash: str, shard: Shard, size: int) -> None:
    """``size``: that of the file which was found, -1 if there is none. Raises :class:`IncompleteArtifact` if bytes are
    absent, :class:`CorruptArtifact` if there are more."""
    if size != shard.size:
        kind = IncompleteArtifact if size < shard.size else CorruptArtifact
        raise kind(f"artifact {hash}: {shard.name} does not have {shard.size} bytes")


def _same_size(path: Path, shard: Shard) -> None:
    check_size(path.parent.name, shard, path.stat().st_size)


def _same_bytes(path: Path, shard: Shard) -> None:
    _same_size(path, shard)
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
            raise CorruptArtifact(f"artifact {path.parent.name}: {shard.name} does not have the hash in its manifest")


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a disk without hard links, or too many of one file
        shutil.copy2(source, target)


def _identity(folder: Path) -> tuple[int, int] | None:
    """Changes when another folder gets this name, or the folder other content; None where there is none."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def seconds_of(marks: Mapping[str, bytes]) -> dict[str, float]:
    """The seconds that were written before; none of a text that is no number, as after a power cut."""
    found = {}
    for name, content in marks.items():
        with suppress(ValueError):
            found[name] = float(content)
    return found


def _sync_folder(folder: Path) -> None:
    """Make the names in it durable, on a file system that offers it for folders: some network ones do not."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)
