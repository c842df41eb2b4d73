"""Signatures with which a worker reads artifacts from another worker, or from the service.

All workers with one key of the role worker share a secret, which their welcome brings; no tenant has it. The reader
signs the artifact's hash and the present minute, so whoever serves the bytes checks the signature without asking
anybody. A hash is a name, not a permission. Times are seconds of the service, which the welcome brings: those of its
wall clock when it started, and monotonic since.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable

from rookery.protocol.common import Struct

READ_HEADER = "X-Rookery-Read"
"""The HTTP header that carries the signature, ``<key>.<minute>.<HMAC-SHA256 in hex>``."""

VALID_MINUTES = 2
"""A signature is valid for its minute and so many before and after: for clocks that drift and requests that wait. Each
request is signed when it is sent, so a transfer may take longer."""

DIGEST = re.compile("[0-9a-f]{64}")
"""The hash that names an artifact."""

MINUTE_DIGITS = 12
"""Of a minute that is read as a number."""


class ReadKey(Struct, kw_only=True):
    """The secret of all workers with one key of the role worker, and its public name."""

    id: str
    secret: bytes


def read_key(key_hash: str) -> ReadKey:
    """The read key of the workers whose API key has this hash. It is the same after a restart of the service, and at a
    standby: peers go on serving each other while the service is away."""
    secret = hmac.digest(key_hash.encode(), b"rookery artifact reads", "sha256")
    return ReadKey(id=hmac.digest(secret, b"name", "sha256").hex()[:16], secret=secret)


def sign_read(key: ReadKey, digest: str, now: float) -> str:
    """The header with which the artifact ``digest`` is read at ``now``."""
    minute = str(int(now // 60))
    return f"{key.id}.{minute}.{_signature(key.secret, digest, minute)}"


def may_read(header: str, digest: str, now: float, secret_of: Callable[[str], bytes | None]) -> bool:
    """Whether ``header`` permits to read the artifact ``digest`` at ``now``; ``secret_of(id)`` is a read key's secret,
    or None for an unknown one. Nothing permits to read what is not named by a hash."""
    id, _, rest = header.partition(".")
    minute, _, signature = rest.partition(".")
    secret = secret_of(id)
    if secret is None or not DIGEST.fullmatch(digest):
        return False
    if not hmac.compare_digest(signature.encode(), _signature(secret, digest, minute).encode()):
        return False
    if not (minute.isascii() and minute.isdigit() and len(minute) <= MINUTE_DIGITS):
        return False
    return abs(int(minute) - now // 60) <= VALID_MINUTES


def _signature(secret: bytes, digest: str, minute: str) -> str:
    return hmac.digest(secret, f"{digest}.{minute}".encode(errors="surrogatepass"), "sha256").hex()
