"""Artifacts in an object store by URL: S3 and services that speak it.

* An artifact is visible once its ``manifest.json`` is, which is put last and only where there is none. Its name is the
  hash of its content, so a second writer of it is harmless.
* Files are written to a local folder first, because their hashes name them, and sent in parts; reads are streams of a
  range. No file is held whole in memory.
* A bucket and prefix belong to one database, whose mark is the object ``owner``: see :mod:`rookery.storage.place`.
* A store that does not answer, denies, or has lost its bucket raises :class:`~rookery.errors.Unavailable`: what asked
  pauses, and resumes by itself. A store that takes a connection and is silent does not answer: no request waits long.

Credentials and region are those of the usual ``AWS_…`` variables.

Layout: ``<prefix>/<hash>/{manifest.json, shards…}``; ``<prefix>/owner``; ``<prefix>/holder``;
``<prefix>/orphans/<hash>``.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from rookery.errors import (
    CorruptArtifact,
    NotFound,
    Unavailable,
    UnreadableArtifact,
    UserError,
    installs,
    shortages,
)
from rookery.folders import PROBE_BYTES
from rookery.network import proxy_of
from rookery.pace import TooSlow, TransferPace
from rookery.protocol import Manifest, Shard
from rookery.storage.artifacts import (
    MANIFEST,
    READ_BYTES,
    Artifacts,
    check_hash,
    check_size,
    decode_manifest,
    seconds_of,
)
from rookery.storage.place import HOLDER, OWNER, STORE_RULES, Owner, StoreRules, admit, away, first_line, understood

try:
    import obstore
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        PermissionDeniedError,
        UnauthenticatedError,
    )
    from obstore.store import MemoryStore, ObjectStore, from_url
except ModuleNotFoundError:
    raise UserError(f"artifacts_url: obstore is missing; {installs('s3')}") from None

ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Where other programs find the address of a store that speaks S3. The library reads them too: it then refuses an
address without TLS, and prefers the first one to an address that it is given."""

EVERYTHING = "*,0.0.0.0/0,::/0"
"""All hosts, as the library writes those that it reaches without a proxy."""

ORPHANS = "orphans"

PROBE = "probe"
"""The object of :meth:`ObjectArtifacts.check_writes`."""

PARTS_AT_ONCE = 4
"""Parts of 5 MiB of one file that are sent at once."""

_STATUS = re.compile(r"status code: ([1-5]\d\d)\b|redirect without LOCATION")

_CODE = re.compile("<Code>([A-Za-z]+)</Code>")

LATER = (408, 409, 412, 425, 429)
"""Statuses of refusals that a later request may not meet."""

SKEWED = "RequestTimeTooSkewed"

LATER_CODES = (SKEWED, "RequestTimeout", "Throttling", "ThrottlingException")
"""Codes of such refusals whose status, 400 or 403, is also that of a mistake: the clock of a machine without a battery
is set some time after it has started."""


def open_store(
    url: str, endpoint: str = "", rules: StoreRules = STORE_RULES, *, seconds: float | None = None, silent: float = 0.0
) -> ObjectStore:
    """The store at ``url``; ``endpoint``: the address of a service that speaks S3, where it is not Amazon's, by default
    that of the usual variables. A request takes at most ``seconds``, by default those of a small one, of which the
    store may be silent for ``silent`` (0: all). Raises :class:`UserError` for a URL of no store."""
    if url.startswith("s3:") and not endpoint:
        endpoint = next(filter(None, map(os.environ.get, ENDPOINT_VARIABLES)), "")
    config: Any = {"endpoint": endpoint, "virtual_hosted_style_request": False} if endpoint else None
    longest = timedelta(seconds=rules.small if seconds is None else seconds)
    client: Any = {"timeout": longest, "allow_http": endpoint.startswith("http:")}
    if endpoint:
        with suppress(UserError):  # a proxy of a kind that only the library may know
            proxy = proxy_of(endpoint)  # not by the rule of the library, which knows no ports and not this machine
            client |= {"proxy_url": proxy} if proxy else {"proxy_url": endpoint, "proxy_excludes": EVERYTHING}
    if silent:
        client["read_timeout"] = timedelta(seconds=silent)
    retry: Any = {"max_retries": rules.retries, "retry_timeout": timedelta(seconds=rules.retry)}
    read = {name: os.environ.pop(name) for name in ENDPOINT_VARIABLES if name in os.environ}
    try:
        return from_url(url, config=config, client_options=client, retry_config=retry)
    except (BaseError, ValueError) as error:
        raise UserError(f"artifacts_url {url}: {first_line(error)}; give one like s3://bucket/prefix") from None
    finally:
        os.environ.update(read)


class ObjectArtifacts(Artifacts):
    """The artifacts in ``store``. ``spool`` is a local folder for those that are being written."""

    remote = True
    _kinds = (BaseError,)

    def __init__(
        self,
        store: ObjectStore,
        url: str,
        spool: Path,
        reads: ObjectStore | None = None,
        uploads: ObjectStore | None = None,
        read_seconds: float = STORE_RULES.silent,
    ) -> None:
        """``reads`` and ``uploads`` reach the same store for the content of files, which takes longer; a reader waits
        ``read_seconds`` for a few bytes."""
        super().__init__(spool)
        self._store = store
        self._reads, self._uploads = reads or store, uploads or store
        self._read_seconds = read_seconds
        self._url = url

    @classmethod
    def at(cls, url: str, endpoint: str, spool: Path, rules: StoreRules = STORE_RULES) -> ObjectArtifacts:
        """The artifacts of the store at ``url``. Raises :class:`UserError` for a URL of no store."""
        store = open_store(url, endpoint, rules)
        if isinstance(store, MemoryStore):
            return cls(store, url, spool)
        reads = open_store(url, endpoint, rules, seconds=rules.file, silent=rules.silent)
        return cls(store, url, spool, reads, open_store(url, endpoint, rules, seconds=rules.upload), rules.silent)

    @property
    def where(self) -> str:
        return self._url

    def claim(self, owner: Owner) -> None:
        """Check that the store can be read and written and belongs to the database ``owner``; mark a new one. Raises
        :class:`UserError`, or :class:`Unavailable` where a later try can succeed."""
        with self._refusals():
            self.inspect(owner)
            assert owner.identity is not None
            try:
                marked = self._mark() is not None  # by itself: then this only shows that it can be written
                obstore.put(self._store, OWNER, owner.identity.encode(), mode="overwrite" if marked else "create")
            except AlreadyExistsError:
                self.inspect(owner)
            if self._mark() != owner.identity:
                raise UserError(f"artifacts_url {self._url} was claimed by another database; give another prefix")
        self._owner = owner.identity

    def inspect(self, owner: Owner) -> None:
        with self._refusals():
            admit(owner, self.where, self._mark(), self._found)

    def _check_mark(self) -> None:
        if self._owner is None:
            return
        try:
            mark = self._mark()
        except (BaseError, OSError) as error:
            raise away(f"{self._url}: {first_line(error)}") from error
        if mark != self._owner:
            found = (
                "there is no such bucket, or no owner's mark in it" if mark is None else "marked by another database"
            )
            raise away(f"{self._url}: {found}")

    def check_writes(self) -> None:
        super().check_writes()
        with self._errors(PROBE):
            obstore.put(self._store, PROBE, bytes(PROBE_BYTES))
            obstore.delete(self._store, PROBE)

    def _check_staging(self) -> None:
        try:
            self.root.stat()
        except OSError as error:
            raise away(f"{self.root}: {first_line(error)}") from error

    def _mark(self) -> str | None:
        try:
            return bytes(obstore.get(self._store, OWNER).bytes()).decode(errors="replace").strip()
        except FileNotFoundError:
            return None

    def _holder(self) -> bytes:
        try:
            return bytes(obstore.get(self._store, HOLDER).bytes())
        except FileNotFoundError:
            return b""

    def _write_holder(self, content: bytes) -> None:
        obstore.put(self._store, HOLDER, content)

    def _remove_holder(self) -> None:
        obstore.delete(self._store, HOLDER)

    def _found(self) -> set[str]:
        return {prefix for prefix in obstore.list_with_delimiter(self._store)["common_prefixes"] if _is_hash(prefix)}

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """The errors of a start."""
        try:
            yield
        except ValueError as error:
            raise UserError(f"artifacts_url {self._url} cannot be used: {first_line(error)}") from None
        except (FileNotFoundError, BaseError) as error:
            status, code = _status(error), _CODE.search(str(error))
            if code is not None and code[1] in LATER_CODES:
                clock = "this machine's clock differs from that of the store, " if code[1] == SKEWED else ""
                raise Unavailable(
                    f"artifacts_url {self._url} cannot be used now: {clock}{code[1]} ({first_line(error)})"
                ) from None
            if status in (401, 403):
                raise UserError(
                    f"artifacts_url {self._url}: permission denied; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to"
                    f" keys that may read, write, list and delete there ({first_line(error)})"
                ) from error
            if status == 404:
                raise UserError(f"artifacts_url {self._url}: there is no such bucket; create it first") from None
            if 300 <= status < 500 and status not in LATER:
                raise UserError(f"artifacts_url {self._url} cannot be used: {first_line(error)}") from None
            raise Unavailable(f"artifacts_url {self._url} cannot be used now: {first_line(error)}") from None

    def open(self, hash: str) -> Manifest:
        with self._errors(hash):
            sizes = {Path(found["path"]).name: found["size"] for found in self._objects(hash)}
            manifest = self._manifest(hash)
            for shard in manifest.shards:
                check_size(hash, shard, sizes.get(shard.name, -1))
            return manifest

    def verify(self, hash: str) -> Manifest:
        manifest = self.open(hash)
        with self._errors(hash):
            for shard in manifest.shards:
                digest = sha256()
                with self.reading(hash, shard) as chunks:
                    for chunk in chunks:
                        digest.update(chunk)
                if digest.hexdigest() != shard.sha256:
                    raise CorruptArtifact(f"artifact {hash}: {shard.name} does not have the hash in its manifest")
        return manifest

    @contextmanager
    def reading(self, hash: str, shard: Shard, start: int = 0) -> Iterator[Iterator[bytes]]:
        with self._errors(hash):
            if start >= shard.size:
                yield iter(())
                return
            found = obstore.get(self._reads, f"{check_hash(hash)}/{shard.name}", options={"range": (start, shard.size)})
            yield _pieces(TransferPace(self._read_seconds).blocks(map(bytes, found.stream(min_chunk_size=1))))

    def path(self, hash: str, shard: str) -> Path:
        """A local path of one file: of a copy that stays until the artifact is deleted or the service starts again.
        Several threads may ask at once."""
        found = self.shard(hash, shard)
        copy = self.root / ".staging" / hash / found.name
        if not copy.exists():
            with shortages("the disk"), self.scratch() as folder:
                part = self._copy(hash, found, folder)
                copy.parent.mkdir(mode=0o700, exist_ok=True)
                part.replace(copy)
        return copy

    def delete(self, hash: str) -> None:
        shutil.rmtree(self.root / ".staging" / check_hash(hash), ignore_errors=True)
        with self._errors(hash):
            self.check()
            names = [found["path"] for found in self._objects(hash)]
            for path in sorted(names, key=lambda path: not path.endswith(f"/{MANIFEST}")):  # the manifest first
                obstore.delete(self._store, path)

    def link(self, hash: str, folder: Path) -> None:
        """Copy the artifact's files to the new ``folder``."""
        manifest = self.open(hash)
        with shortages("the disk"):
            folder.mkdir(mode=0o700)
            try:
                for shard in manifest.shards:
                    self._copy(hash, shard, folder)
                (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))
            except NotFound:
                shutil.rmtree(folder)
                raise

    def _copy(self, hash: str, shard: Shard, folder: Path) -> Path:
        path = folder / shard.name
        with path.open("wb") as file, self.reading(hash, shard) as chunks:
            file.writelines(chunks)
        return path

    def hashes(self) -> set[str]:
        with self._errors(""):
            found = self._found()
            self.check()
            return found

    def sweep(self) -> int:
        with understood(self._check_staging):
            leftovers = list(self._staging.iterdir())
            for leftover in leftovers:
                shutil.rmtree(leftover)
            return len(leftovers)

    def _orphan_marks(self) -> dict[str, float]:
        with self._errors(""):
            paths = [found["path"] for part in obstore.list(self._store, ORPHANS) for found in part]
            names = {path.rpartition("/")[2]: path for path in paths}
            return seconds_of({name: bytes(obstore.get(self._store, path).bytes()) for name, path in names.items()})

    def _mark_orphan(self, name: str, ran: float) -> None:
        with self._errors(name):
            obstore.put(self._store, f"{ORPHANS}/{name}", str(ran).encode())

    def _unmark_orphan(self, name: str) -> None:
        with self._errors(name):
            obstore.delete(self._store, f"{ORPHANS}/{name}")

    def publish(self, folder: Path, manifest: Manifest) -> None:
        self.check()
        try:
            self.verify(manifest.hash)
        except NotFound:
            self._send(folder, manifest)
        except CorruptArtifact:
            self.delete(manifest.hash)
            self._send(folder, manifest)
        shutil.rmtree(folder)

    def _send(self, folder: Path, manifest: Manifest) -> None:
        with self._errors(manifest.hash):
            for shard in manifest.shards:
                path = f"{manifest.hash}/{shard.name}"
                obstore.put(self._uploads, path, folder / shard.name, max_concurrency=PARTS_AT_ONCE)
            try:
                content = msgspec.json.encode(manifest)
                obstore.put(self._store, f"{manifest.hash}/{MANIFEST}", content, mode="create")
            except AlreadyExistsError:  # another writer's, with the same content
                return

    def _manifest(self, hash: str) -> Manifest:
        return decode_manifest(bytes(obstore.get(self._store, f"{hash}/{MANIFEST}").bytes()), hash)

    def _objects(self, hash: str) -> list[Any]:
        return [found for part in obstore.list(self._store, check_hash(hash)) for found in part]

    @contextmanager
    def _errors(self, hash: str) -> Iterator[None]:
        with understood(self.check, (BaseError,), absent=f"no artifact {hash}"):
            yield


def _pieces(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The bytes of ``blocks`` in pieces of :data:`READ_BYTES` or a little more. Raises :class:`Unavailable`."""
    piece = bytearray()
    try:
        for block in blocks:
            piece += block
            if len(piece) >= READ_BYTES:
                yield bytes(piece)
                piece.clear()
    except TooSlow as error:
        raise UnreadableArtifact("the artifacts do not answer", str(error)) from None
    if piece:
        yield bytes(piece)


def _status(error: Exception) -> int:
    """The HTTP status of a store's answer, 0 for none: the library gives some refusals a type and says the others, such
    as all of a list, in its text alone."""
    for kind, status in ((FileNotFoundError, 404), (PermissionDeniedError, 403), (UnauthenticatedError, 401)):
        if isinstance(error, kind):
            return status
    found = _STATUS.search(str(error))
    if found is None:
        return 0
    return int(found[1] or 301)


def _is_hash(prefix: str) -> bool:
    try:
        return bool(check_hash(prefix))
    except NotFound:
        return False
