"""Requests to the Hugging Face hub that end: a hub that is silent is given up within seconds.

The hub's library asks for a repository without a time limit and repeats each request that times out five times. Here
every request has a limit, and a request whose second attempt got no answer either is not repeated.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

SECONDS = 10.0
"""Longest silence of the hub during a request: a hub that answers does so within two."""
ATTEMPTS = 2
"""Attempts of one request without an answer, after which the hub counts as silent."""


class HubSilent(Exception):
    """The hub does not answer."""


def bound_requests(seconds: float = SECONDS) -> None:
    """Give every request of the hub's library in this process a time limit of ``seconds``. The library raises
    :class:`HubSilent` for one that got no answer :data:`ATTEMPTS` times."""
    import huggingface_hub

    usual = huggingface_hub.get_session()
    unanswered: Counter[str] = Counter()

    def sending(request: Any) -> None:
        asked = f"{request.method} {request.url}"
        if unanswered[asked] >= ATTEMPTS:
            raise HubSilent(f"no answer within {ATTEMPTS} x {seconds:g} s")
        unanswered[asked] += 1
        given = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            kind: seconds if given.get(kind) is None else min(seconds, given[kind])
            for kind in ("connect", "read", "write", "pool")
        }

    def answered(response: Any) -> None:
        del unanswered[f"{response.request.method} {response.request.url}"]

    hooks: Any = {
        "request": [*usual.event_hooks["request"], sending],
        "response": [*usual.event_hooks["response"], answered],
    }

    def client() -> Any:
        return type(usual)(event_hooks=hooks, follow_redirects=True, timeout=seconds)

    huggingface_hub.set_client_factory(client)
