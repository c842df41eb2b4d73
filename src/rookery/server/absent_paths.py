"""Paths of OpenAI's API that have no route here, each with the reason and, where there is one, with the way instead."""

from __future__ import annotations

_NOT_TEXT = "the models here read and write text alone"
_NOT_STORED = "no conversation is stored here; send it whole to /v1/chat/completions or /v1/responses"
_NOT_JUDGED = "nothing is classified here; a chat with a response_format can judge a text"
_ROWS_ALONE = "files here are rows to train on; a chat brings its texts itself"
_NOT_SENT = "no events are sent; read a job, or its events"
_ADMINISTERED = "tenants, keys, limits and usage are the administrator's; see /docs"

ABSENT = {
    "agents": _NOT_STORED,
    "assistants": _NOT_STORED,
    "audio": _NOT_TEXT,
    "batches": "requests are not collected; send each to its path at once, where they queue",
    "chat/completions": "chats are not stored",
    "chatkit": _NOT_STORED,
    "containers": _ROWS_ALONE,
    "content_provenance_checks": _NOT_JUDGED,
    "conversations": _NOT_STORED,
    "decisions": _NOT_JUDGED,
    "evals": "a job evaluates its policy itself, and /v1/fine_tuning/alpha/graders/run grades a text",
    "fine_tuning/checkpoints": "a checkpoint belongs to its tenant alone",
    "images": _NOT_TEXT,
    "live": _NOT_TEXT,
    "moderations": _NOT_JUDGED,
    "organization": _ADMINISTERED,
    "projects": _ADMINISTERED,
    "realtime": _NOT_TEXT,
    "responses": "responses are not stored; send the whole conversation as input",
    "responses/compact": "conversations are not shortened here",
    "safety": _NOT_JUDGED,
    "skills": _ROWS_ALONE,
    "threads": _NOT_STORED,
    "uploads": "a file comes in one request; send it to /v1/files",
    "vaults": _ROWS_ALONE,
    "vector_stores": _ROWS_ALONE,
    "videos": _NOT_TEXT,
    "webhook_endpoints": _NOT_SENT,
    "webhook_event_types": _NOT_SENT,
}
"""By the beginning of a path: why nothing is there."""


def absence(path: str) -> str:
    """Why there is nothing at a ``path`` below ``/v1``; empty where OpenAI's API has nothing there either."""
    parts = path.split("/")
    return ABSENT.get("/".join(parts[:2])) or ABSENT.get(parts[0], "")
