"""A small S3 server in memory whose answers a test chooses: right ones, or those of a store that is away."""

from __future__ import annotations

import hashlib
import random
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REFUSALS = {
    "slow down": (503, "SlowDown"),
    "internal error": (500, "InternalError"),
    "no bucket": (404, "NoSuchBucket"),
    "expired": (403, "ExpiredToken"),
    "denied": (403, "AccessDenied"),
    "clock": (403, "RequestTimeTooSkewed"),
    "idle": (400, "RequestTimeout"),
}
FLAKY_SHARE = 0.3


class S3:
    """Its objects by ``bucket/key``, and how it answers: ``ok``, ``flaky`` or one of :data:`REFUSALS`."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.objects: dict[str, bytes] = {}
        self.mode = "ok"
        self.refused = 0
        """Requests that it refused."""
        self.lock = threading.Lock()
        self.random = random.Random(1)

    def refusal(self) -> tuple[int, str] | None:
        if self.mode == "flaky":
            return REFUSALS["slow down"] if self.random.random() < FLAKY_SHARE else None
        return REFUSALS.get(self.mode)


@contextmanager
def s3() -> Iterator[S3]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.store = store = S3(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        return

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _any(self) -> None:
        store: S3 = self.server.store  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query, keep_blank_values=True)
        key = urllib.parse.unquote(url.path).lstrip("/")
        with store.lock:
            if refusal := store.refusal():
                store.refused += 1
                self._refuse(*refusal)
            elif self.command == "PUT":
                if self.headers.get("If-None-Match") == "*" and key in store.objects:
                    self._refuse(412, "PreconditionFailed")
                else:
                    store.objects[key] = body
                    self._answer(200, ETag=f'"{hashlib.md5(body).hexdigest()}"')
            elif self.command == "GET" and "list-type" in query:
                self._list(store, key.rstrip("/"), query)
            elif self.command == "DELETE":
                store.objects.pop(key, None)
                self._answer(204)
            elif self.command == "POST" and "delete" in query:
                names = [name.decode() for name in re.findall(rb"<Key>(.*?)</Key>", body)]
                for name in names:
                    store.objects.pop(f"{key.rstrip('/')}/{name}", None)
                gone = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
                self._answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
            elif key not in store.objects:
                self._refuse(404, "NoSuchKey")
            else:
                self._get(store.objects[key])

    def _get(self, content: bytes) -> None:
        headers: dict[str, Any] = {"ETag": '"x"', "Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            headers["Content_Range"] = f"bytes {start}-{end}/{len(content)}"
            self._answer(206, content[start : end + 1], **headers)
        else:
            self._answer(200, content, **headers)

    def _list(self, store: S3, bucket: str, query: dict[str, list[str]]) -> None:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        found, folders = [], set()
        for name in sorted(store.objects):
            if name.startswith(f"{bucket}/{prefix}"):
                key = name.removeprefix(f"{bucket}/")
                rest = key.removeprefix(prefix)
                if delimiter and delimiter in rest:
                    folders.add(prefix + rest.split(delimiter)[0] + delimiter)
                else:
                    found.append((key, len(store.objects[name])))
        contents = "".join(
            f"<Contents><Key>{key}</Key><Size>{size}</Size><ETag>x</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, size in found
        )
        prefixes = "".join(f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>" for name in sorted(folders))
        self._answer(
            200,
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{prefix}</Prefix><KeyCount>{len(found)}</KeyCount>"
            f"<IsTruncated>false</IsTruncated>{contents}{prefixes}</ListBucketResult>".encode(),
            Content_Type="application/xml",
        )

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _any  # noqa: N815
