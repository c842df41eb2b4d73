"""A client of a service, in a process of its own: what its calls take, one after another over one kept connection."""

from __future__ import annotations

import time
from typing import Any

import httpx
from benchmarks.lib.child import serve

http = httpx.Client()


def run(url: str, key: str, calls: list[dict[str, Any] | None]) -> dict[str, Any]:
    """``calls`` are bodies to post, or None to get. Raises what httpx does."""
    headers = {"Authorization": f"Bearer {key}"}
    spent = []
    for body in calls:
        began = time.perf_counter()
        http.request("GET" if body is None else "POST", url, json=body, headers=headers).raise_for_status()
        spent.append(time.perf_counter() - began)
    return {"seconds": spent}


if __name__ == "__main__":
    serve({"httpx": httpx.__version__}, run)
