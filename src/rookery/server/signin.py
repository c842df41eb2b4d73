"""Signing in to the page: an API key becomes a cookie, so that no script of the page can read the key.

* The cookie holds the hash of the key, an end, and a code over both that only this service can compute. It opens what
  the key opens, until it ends or the key is revoked. It survives a restart of the service.
* It is HttpOnly and SameSite=Strict. Pages at another port of the same machine count as the same site, so a request
  that changes something must also bring :data:`HEADER`, which a foreign page cannot send.
* Only a key gives a cookie or a link, so a stolen cookie ends when it was to end.
* ``rookery open`` gets a link that signs in once, within a minute. A restart of the service ends it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from cachetools import TTLCache
from fastapi import Response
from starlette.requests import HTTPConnection

from rookery.clock import Clock
from rookery.errors import Unauthorized

HEADER = "X-Rookery-Page"
"""A header that only scripts of the service's own page can send: browsers ask before they send it elsewhere."""

COOKIE_SECONDS = 7 * 86400
"""A week: the page stays open all day, and a lost laptop does not open it forever."""

LINK_SECONDS = 60
"""From ``rookery open`` to the browser takes a few seconds."""

SAFE_METHODS = ("GET", "HEAD")


@dataclass
class SignIns:
    """Cookies and links that name a key by its hash. ``secret`` is of this service alone."""

    clock: Clock
    secret: bytes
    link_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    """Of this process: which links were used is known only here."""

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self.secret + b"name").hexdigest()
        self.cookie = f"rookery_{digest[:8]}"
        """Cookies do not depend on the port: two services on one machine have different names."""
        self._used: TTLCache[str, None] = TTLCache(10_000, LINK_SECONDS, self.clock.monotonic)

    def set_cookie(self, response: Response, key: str, *, secure: bool) -> None:
        """Signs in with the key of this hash."""
        value = self._signed("cookie", key, COOKIE_SECONDS)
        options = {"max_age": COOKIE_SECONDS, "httponly": True, "samesite": "strict", "secure": secure, "path": "/"}
        response.set_cookie(self.cookie, value, **options)  # type: ignore[arg-type]

    def delete_cookie(self, response: Response) -> None:
        response.delete_cookie(self.cookie, path="/", httponly=True, samesite="strict")

    def key_of(self, connection: HTTPConnection) -> tuple[str, float]:
        """The hash of the key with which a request's browser signed in, and when its cookie ends; an empty hash for a
        connection that is no request, without a valid cookie, and for one that another page may have sent."""
        if connection.scope["type"] != "http" or not (value := connection.cookies.get(self.cookie)):
            return "", 0.0
        if connection.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            return "", 0.0
        if connection.scope["method"] not in SAFE_METHODS and HEADER not in connection.headers:
            return "", 0.0
        return self._verified("cookie", value)

    def link(self, key: str) -> str:
        """A text with which one browser signs in with the key of this hash."""
        return self._signed("link", key, LINK_SECONDS)

    def redeem(self, link: str) -> str:
        """The hash of the key of a link, once. Raises :class:`Unauthorized`."""
        key, _ = self._verified("link", link)
        if not key or link in self._used:
            raise Unauthorized("the link was used or is older than a minute; get another one: rookery open")
        self._used[link] = None
        return key

    def _signed(self, purpose: str, key: str, seconds: float) -> str:
        text = f"{key}.{int(self.clock.time() + seconds)}.{secrets.token_hex(8)}"
        return f"{text}.{self._code(purpose, text)}"

    def _verified(self, purpose: str, value: str) -> tuple[str, float]:
        """The key and the end of a valid cookie or link; an empty key for another text."""
        text, _, code = value.rpartition(".")
        if not hmac.compare_digest(code.encode(), self._code(purpose, text).encode()):
            return "", 0.0
        key, end, _ = text.split(".")
        return key if self.clock.time() < int(end) else "", float(end)

    def _code(self, purpose: str, text: str) -> str:
        secret = self.link_secret if purpose == "link" else self.secret
        return hmac.digest(secret, f"{purpose} {text}".encode(), "sha256").hex()
