"""Models outside of the job that judge replies, by OpenAI's chat API: the administrator names them."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rookery.environments.models import ModelAnswer, ModelQuestion
from rookery.environments.outbound import AnswerLimits, ServerBusy, request_json
from rookery.errors import UserError, short
from rookery.network import named_services

SECONDS = 60.0
"""Longest wait for a judge's answer."""

REPEAT_SECONDS = 30.0
"""Time in which a question to a judge that is busy is asked again: half of the default ``step_timeout``, within which
the owner of the job reads why no answer came."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 8.0
"""Between two attempts, where the judge names no time: twice as long after each."""

SHORTEST_PAUSE = 0.1


@dataclass(frozen=True)
class NamedJudge:
    """Where a judge is asked."""

    url: str
    model: str
    variable: str = ""
    """The environment variable with its key; empty for none."""
    first_pause: float = field(default=FIRST_PAUSE, kw_only=True)
    repeat_seconds: float = field(default=REPEAT_SECONDS, kw_only=True)


_named: dict[str, NamedJudge] = {}


def parse_judges(text: str) -> dict[str, NamedJudge]:
    """The judges of the setting ``judges``, by name. Raises :class:`UserError`."""
    named = named_services(text, "setting ROOKERY_JUDGES", "NAME=URL MODEL [VARIABLE]", "the key")
    return {name: NamedJudge(*words) for name, words in named.items()}


def set_judges(text: str, *, first_pause: float = FIRST_PAUSE, repeat_seconds: float = REPEAT_SECONDS) -> None:
    """The judges that jobs may name. Called once when a process starts."""
    _named.clear()
    for name, judge in parse_judges(text).items():
        _named[name] = replace(judge, first_pause=first_pause, repeat_seconds=repeat_seconds)


def require_judge(name: str) -> NamedJudge:
    """Raises :class:`UserError` for a name that the administrator did not give."""
    if name not in _named:
        known = f"there are {', '.join(sorted(_named))}" if _named else "there are none"
        raise UserError(
            f"verifier judge: model: given {short(name)!r}, but {known}; the administrator names models in"
            " ROOKERY_JUDGES"
        )
    return _named[name]


def ask_judge(name: str, messages: Sequence[Mapping[str, str]]) -> ModelAnswer:
    """The judge's answer to a conversation. Blocks; raises :class:`UserError`."""
    return ask_named(require_judge(name), name, {"messages": [dict(message) for message in messages]})


def named_judge(name: str) -> NamedJudge | None:
    """The judge of this name, where the administrator gave one."""
    return _named.get(name)


def answer_of(judge: NamedJudge, question: ModelQuestion) -> ModelAnswer:
    """A judge's answer to a question. Blocks; raises :class:`UserError`."""
    body: dict[str, Any] = {
        "messages": [dict(message) for message in question.messages], "max_tokens": question.max_tokens,
        "temperature": question.temperature, "seed": question.seed,
    }  # fmt: skip
    if question.top_p < 1:
        body["top_p"] = question.top_p
    if question.schema:
        form = {"name": "answer", "strict": True, "schema": json.loads(question.schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return ask_named(judge, question.model, body)


def ask_named(judge: NamedJudge, name: str, arguments: Mapping[str, Any]) -> ModelAnswer:
    """The answer of a judge to a chat completion with these arguments; one that is busy is asked again. Blocks; raises
    :class:`UserError`."""
    key = os.environ.get(judge.variable, "") if judge.variable else ""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"temperature": 0, **arguments, "model": judge.model}
    url = f"{judge.url}/chat/completions"
    answer = _repeated(partial(request_json, url, f"judge {name}", body, headers, allowed="*"), judge)
    try:
        choice = answer["choices"][0]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise UserError(f"judge {name}: {short(url)} answers in another form than a chat completion") from None
    used = answer.get("usage")
    counts = [used.get(name) if isinstance(used, dict) else 0 for name in ("prompt_tokens", "completion_tokens")]
    read, written = (count if isinstance(count, int) else 0 for count in counts)
    return ModelAnswer(text if isinstance(text, str) else "", read, written, finish if isinstance(finish, str) else "")


def _repeated(request: Callable[..., Any], judge: NamedJudge) -> Any:
    """The answer to ``request(most=…)``, within :data:`SECONDS`; it is made again where the judge is busy, for its
    ``repeat_seconds``."""
    began, pause = time.monotonic(), judge.first_pause
    while True:
        try:
            return request(most=AnswerLimits(max(began + SECONDS - time.monotonic(), 1.0)))
        except ServerBusy as error:
            wait = max(error.retry_after, SHORTEST_PAUSE) if error.retry_after else pause * random.uniform(0.5, 1.0)
            if time.monotonic() + wait > began + judge.repeat_seconds:
                raise
            time.sleep(wait)
            pause = min(2 * pause, LONGEST_PAUSE)
