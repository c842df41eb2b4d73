"""Models outside of the job that judge replies, by OpenAI's chat API: the administrator names them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rookery.environments.outbound import request_json
from rookery.errors import UserError, short
from rookery.network import service_url

SECONDS = 60.0
"""Longest wait for a judge's answer."""


@dataclass(frozen=True)
class NamedJudge:
    """Where a judge is asked."""

    url: str
    model: str
    variable: str
    """The environment variable with its key; empty for none."""


_named: dict[str, NamedJudge] = {}


def parse_judges(text: str) -> dict[str, NamedJudge]:
    """The judges of the setting ``judges``, by name. Raises :class:`UserError`."""
    found: dict[str, NamedJudge] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, _, rest = entry.partition("=")
        parts = rest.split()
        if not name.strip() or len(parts) not in (2, 3):
            raise UserError(
                f"setting ROOKERY_JUDGES: given {short(entry)!r}, allowed: NAME=URL MODEL [VARIABLE], comma-separated,"
                " where VARIABLE is the environment variable with the key"
            )
        url = service_url(parts[0], "setting ROOKERY_JUDGES").rstrip("/")
        found[name.strip()] = NamedJudge(url, parts[1], parts[2] if len(parts) == 3 else "")
    return found


def set_judges(text: str) -> None:
    """The judges that jobs may name. Called once when a process starts."""
    _named.clear()
    _named.update(parse_judges(text))


def require_judge(name: str) -> NamedJudge:
    """Raises :class:`UserError` for a name that the administrator did not give."""
    if name not in _named:
        known = f"there are {', '.join(sorted(_named))}" if _named else "there are none"
        raise UserError(
            f"verifier judge: model: given {short(name)!r}, but {known}; the administrator names models in"
            " ROOKERY_JUDGES"
        )
    return _named[name]


def ask_judge(name: str, messages: Sequence[Mapping[str, str]]) -> str:
    """The judge's answer to a conversation. Blocks; raises :class:`UserError`."""
    judge = require_judge(name)
    key = os.environ.get(judge.variable, "") if judge.variable else ""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": judge.model, "messages": [dict(message) for message in messages], "temperature": 0}
    url = f"{judge.url}/chat/completions"
    answer = request_json(url, f"judge {name}", body, headers, allowed="*", seconds=SECONDS)
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise UserError(f"judge {name}: {short(url)} answers in another form than a chat completion") from None
    return text if isinstance(text, str) else ""
