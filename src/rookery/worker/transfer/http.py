"""One HTTP exchange about bytes: how a file is filled, what an answer means, what is wrong with what came."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
from safetensors import SafetensorError

from rookery import protocol
from rookery.errors import RookeryError

_REFUSED = {401, 403, 404, 410}
"""Answers to a ticket that is not, or no longer, good."""

_BUSY = {408, 425, 429, 502, 503, 504}
"""Answers that may be others in a moment."""


class TransferFailed(Exception):
    """Bytes could not be had or brought; the message is one line."""


class Unreachable(TransferFailed):
    """The service did not answer, for as long as it was asked."""


class CorruptArtifact(TransferFailed):
    """The bytes are not those that the hash names; asking the same again does not help."""


class TicketRefused(TransferFailed):
    """The ticket is not honoured."""


class RetryTransfer(Exception):
    """The other end answered that it cannot now."""


def raise_for_status(method: str, url: str, status: int) -> None:
    """Raises what an answer other than 2xx means: :class:`TicketRefused`, :class:`Again`, :class:`TransferFailed`."""
    if status in _REFUSED:
        raise TicketRefused(f"{method} {url}: the ticket is not good (HTTP {status})")
    if status == 507:
        raise TransferFailed(f"{method} {url}: the service's disk is full")
    if status in _BUSY:
        raise RetryTransfer(f"HTTP {status}")
    if status >= 300:
        raise TransferFailed(f"{method} {url}: HTTP {status}")


def is_loopback(address: str) -> bool:
    """Whether an address is this machine's own, to which no proxy leads."""
    return urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")


def one_line(error: BaseException) -> str:
    """What went wrong, for the other end; an error that nobody wrote for people to read is named."""
    text = " ".join(str(error).split())
    return text if is_plain(error) else f"{type(error).__name__}: {text}"


def system_error(error: BaseException) -> int:
    """The system's number for why a file could not be read or written; 0 if it was something else. safetensors tells
    it in words alone."""
    if isinstance(error, SafetensorError):
        said = re.search(r"\(os error (\d+)\)", str(error))
        return int(said[1]) if said else 0
    return (error.errno or 0) if isinstance(error, OSError) else 0


def is_plain(error: BaseException) -> bool:
    """Whether the message says it all, without a traceback."""
    return isinstance(error, TransferFailed | RookeryError | ValueError)


def manifest_in(content: bytes, digest: str) -> protocol.Manifest:
    """The manifest in ``content``, which must be the one that ``digest`` names."""
    try:
        manifest = msgspec.json.decode(content, type=protocol.Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptArtifact(f"artifact {digest[:12]} is corrupt: no manifest ({error})") from None
    if protocol.manifest_of(manifest.shards).hash != digest or manifest.hash != digest:
        raise CorruptArtifact(f"artifact {digest[:12]} is corrupt: its manifest does not have the hash that names it")
    if any(Path(shard.name).name != shard.name for shard in manifest.shards):
        raise CorruptArtifact(f"artifact {digest[:12]} names a shard outside its folder")
    return manifest


async def fill(
    http: httpx.AsyncClient, url: str, ticket: str, part: Path, size: int, count: Callable[[int], object]
) -> None:
    """Bring the file ``part`` closer to its ``size`` bytes, going on from what it holds; ``count`` is told of the bytes
    that came. Raises what :func:`judge` does, ``httpx.HTTPError``, and :class:`CorruptArtifact` for too much."""
    have = size_of(part) if size_of(part) < size else 0
    headers = {"X-Rookery-Ticket": ticket} | ({"Range": f"bytes={have}-"} if have > 0 else {})
    async with http.stream("GET", url, headers=headers) as response:
        raise_for_status("GET", url, response.status_code)
        with part.open("ab" if response.status_code == 206 else "wb") as file:
            async for chunk in response.aiter_raw():
                if file.tell() + len(chunk) > size:
                    raise CorruptArtifact(f"GET {url}: longer than the {size} bytes that its manifest says")
                file.write(chunk)
                count(len(chunk))


def size_of(path: Path) -> int:
    """Bytes of a file; -1 if there is none."""
    return path.stat().st_size if path.exists() else -1
