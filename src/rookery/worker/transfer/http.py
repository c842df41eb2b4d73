"""One HTTP exchange of artifact bytes, as the service and peers serve them: errors, statuses, resumable downloads.

Promises:

* Every error that a caller may see is a :class:`TransferFailed` with a message of one line; :class:`RetryTransfer` and
  ``httpx`` errors stay inside the ``transfer`` package.
* A manifest is accepted only under the hash that names it, and never names a file outside its folder.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import msgspec
from safetensors import SafetensorError

from rookery import protocol
from rookery.errors import RookeryError
from rookery.network import http_tls, proxy_of
from rookery.pace import TooSlow, TransferPace

REFUSALS = {401, 403, 404, 410}
"""Statuses for a signature or ticket that is not valid now, and for an artifact that is not there."""

MANIFEST_BYTES = 1 << 20
"""Largest manifest that is read from a peer: one names a few files, a hundred bytes each."""

TRANSIENT_STATUSES = {408, 425, 429, 502, 503, 504}
"""Statuses after which the same request may succeed later."""


class TransferFailed(Exception):
    """Bytes could not be pulled or uploaded; the message is one line."""


class Unreachable(TransferFailed):
    """The service did not answer within all attempts."""


class CorruptDownload(TransferFailed):
    """The bytes do not have the hash that names them; a retry does not help."""


class ReadRefused(TransferFailed):
    """The other end has no such artifact, or the signature or ticket is not valid now."""


class RetryTransfer(Exception):
    """The other end cannot answer now, or the connection ended early."""


class SlowTransfer(RetryTransfer):
    """Hardly anything came, or went: that is no progress."""


def service_client(addresses: str, timeout_seconds: float, ca_file: str = "") -> httpx.AsyncClient:
    """A client of the service at an HTTP address, the first of several, comma-separated ones, which may send nothing
    for ``timeout_seconds``. ``ca_file`` is as in :func:`~rookery.network.client_tls`."""
    bases = addresses.split(",")
    ways = {
        each: httpx.AsyncHTTPTransport(verify=http_tls(each, ca_file), proxy=proxy_of(each), trust_env=False)
        for each in bases
    }
    return httpx.AsyncClient(
        base_url=bases[0], timeout=timeout_seconds, verify=http_tls(bases[0], ca_file), trust_env=False, mounts=ways
    )


def raise_for_status(method: str, url: str, status: int) -> None:
    """Raises :class:`ReadRefused`, :class:`RetryTransfer` or :class:`TransferFailed` for a status other than 2xx."""
    if status in REFUSALS:
        raise ReadRefused(f"{method} {url}: refused (HTTP {status})")
    if status == 507:
        raise TransferFailed(f"{method} {url}: the service's disk is full")
    if status in TRANSIENT_STATUSES:
        raise RetryTransfer(f"HTTP {status}")
    if status >= 300:
        raise TransferFailed(f"{method} {url}: HTTP {status}")


class RunningHash:
    """The SHA-256 of a file that grows, so that its hash is there with its last byte: the receivers of a chain would
    all compute theirs at its end, one after the other on a machine with few cores."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._size = 0

    def begin(self, at: int) -> None:
        """The next block is written at this byte of the file."""
        if at == 0:
            self._hash, self._size = hashlib.sha256(), 0
        elif at != self._size:
            self._size = -1

    def add(self, block: bytes) -> None:
        if self._size >= 0:
            self._hash.update(block)
            self._size += len(block)

    def digest(self, size: int) -> str | None:
        """The hash of a file of ``size`` bytes, in hex; None if it has not seen all of them."""
        return self._hash.hexdigest() if self._size == size else None


async def download(
    http: httpx.AsyncClient,
    url: str,
    signature: str,
    part: Path,
    size: int,
    count: Callable[[int], object],
    running: RunningHash | None = None,
) -> None:
    """Append to the file ``part`` until it has ``size`` bytes, starting at its present end; ``count`` is called with
    the size of each block received, when it is written, and may raise; ``running`` takes the bytes. Returns early if
    the other end ends early.

    Raises the errors of :func:`raise_for_status`, ``httpx.HTTPError``, :class:`SlowTransfer`, and
    :class:`CorruptDownload` if more than ``size`` bytes arrive."""
    have = size_of(part) if size_of(part) < size else 0
    headers = {protocol.READ_HEADER: signature} | ({"Range": f"bytes={have}-"} if have > 0 else {})
    async with _answer(http, url, headers) as (response, pace):
        with part.open("ab" if response.status_code == 206 else "wb") as file:
            if running is not None:
                running.begin(file.tell())
            async for block in pace.ablocks(response.aiter_raw()):
                if file.tell() + len(block) > size:
                    raise CorruptDownload(f"GET {url}: longer than the {size} bytes that its manifest states")
                file.write(block)
                if running is not None:
                    running.add(block)
                count(len(block))


@asynccontextmanager
async def _answer(
    http: httpx.AsyncClient, url: str, headers: dict[str, str]
) -> AsyncIterator[tuple[httpx.Response, TransferPace]]:
    """An answer with status 2xx, and the pace of its bytes, whose longest silence is the client's. Raises as
    :func:`download` does."""
    pace = TransferPace(http.timeout.read or 0.0)
    async with AsyncExitStack() as opened:
        try:
            response = await pace.wait(opened.enter_async_context(http.stream("GET", url, headers=headers)))
            raise_for_status("GET", url, response.status_code)
            yield response, pace
        except TooSlow as error:
            raise SlowTransfer(str(error)) from None


async def fetch(http: httpx.AsyncClient, url: str, signature: str = "") -> bytes:
    """All that is at ``url``. Raises as :func:`download` does."""
    async with _answer(http, url, {protocol.READ_HEADER: signature} if signature else {}) as (response, pace):
        return b"".join([block async for block in pace.ablocks(response.aiter_bytes())])


async def fetch_manifest(http: httpx.AsyncClient, url: str, signature: str) -> bytes:
    """The manifest that a peer or the service sends, for :func:`decode_manifest` to check. Raises as :func:`download`
    does."""
    content = b""
    async with _answer(http, url, {protocol.READ_HEADER: signature}) as (response, pace):
        async for block in pace.ablocks(response.aiter_bytes()):
            content += block
            if len(content) > MANIFEST_BYTES:
                raise CorruptDownload(f"GET {url}: no manifest has more than {MANIFEST_BYTES} bytes")
    return content


def decode_manifest(content: bytes, digest: str) -> protocol.Manifest:
    """The manifest in ``content``. Raises :class:`CorruptDownload` unless it is valid and its hash is ``digest``."""
    try:
        manifest = msgspec.json.decode(content, type=protocol.Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptDownload(f"artifact {digest[:12]} is corrupt: no manifest ({error})") from None
    if protocol.manifest_of(manifest.shards).hash != digest or manifest.hash != digest:
        raise CorruptDownload(f"artifact {digest[:12]} is corrupt: its manifest does not have the hash that names it")
    if any(Path(shard.name).name != shard.name for shard in manifest.shards):
        raise CorruptDownload(f"artifact {digest[:12]} names a shard outside its folder")
    return manifest


def size_of(path: Path) -> int:
    """Size of a file in bytes; -1 if it does not exist."""
    return path.stat().st_size if path.exists() else -1


def one_line(error: BaseException) -> str:
    """The error's message on one line, preceded by its type unless the message is written for users."""
    text = " ".join(str(error).split())
    return text if is_plain(error) else f"{type(error).__name__}: {text}"


def is_plain(error: BaseException) -> bool:
    """Whether the message is complete without a traceback."""
    return isinstance(error, TransferFailed | RookeryError | ValueError)


def errno_of(error: BaseException) -> int:
    """The ``errno`` of a failed read or write; 0 for other errors. safetensors states it only in its message."""
    if isinstance(error, SafetensorError):
        found = re.search(r"\(os error (\d+)\)", str(error))
        return int(found[1]) if found else 0
    return (error.errno or 0) if isinstance(error, OSError) else 0
