"""Chat messages as rows and environments give them, and as the policy reads them.

A chat template gets a role and a text per message, nothing else. So a message with anything more is refused, not cut:
a call of a tool that is dropped makes another conversation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rookery.environments.base import Message
from rookery.errors import nearest

ROLES = ("system", "user", "assistant", "tool")
"""The same as in the chat API."""

_FORM = '{"role": "user", "content": "…"}'
_ROLE_HINTS = {"human": "write user", "gpt": "write assistant", "developer": "write system", "function": "write tool"}
_FIELD_HINTS = {
    "tool_calls": "write the calls into content, as the model writes them",
    "function_call": "write the call into content, as the model writes it",
    "tool_call_id": "leave it out",
    "name": "write it into content, or leave it out",
    "reasoning_content": "write it into content, as the model writes it",
}


class MessageRefused(ValueError):
    """Messages that a policy cannot read as they are; one line: the message, the mistake, the remedy."""


def conversation(messages: Sequence[Any], path: str = "messages", *, before_reply: bool = True) -> list[Message]:
    """The messages as a chat template gets them; ``path`` names them in errors. Fields that are null count as absent,
    and a content of several texts as their concatenation. With ``before_reply`` the policy replies next. Raises
    :class:`MessageRefused`."""
    taken = [
        {**message} if _plain(message) else _taken(message, f"{path}.{number}")
        for number, message in enumerate(messages)
    ]
    if before_reply and taken and taken[-1]["role"] == "assistant":
        raise MessageRefused(
            f"{path}.{len(taken) - 1} is the assistant's: the policy replies after the last message, and would read an"
            " answer there; leave it out, and give the answer in a field of its own, such as answer"
        )
    return taken


def _plain(message: Any) -> bool:
    """Whether a message needs no closer look, as nearly all do."""
    if type(message) is not dict or len(message) != 2:
        return False
    return type(message.get("content")) is str and message.get("role") in ROLES


def _taken(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise MessageRefused(f"{where} is {shown(message)}; give {_FORM}")
    for name in message:
        if name not in ("role", "content") and message[name] is not None:
            hint = _FIELD_HINTS.get(str(name), "write it into content, or leave it out")
            raise MessageRefused(
                f"{where}.{name} is {shown(message[name])}, but only role and content reach the model; {hint}"
            )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or content is None:
        raise MessageRefused(f"{where} is {shown(message)}; give {_FORM}")
    if role not in ROLES:
        hint = _ROLE_HINTS.get(role) or nearest(role, ROLES) or f"give {', '.join(ROLES)}"
        raise MessageRefused(f"{where}.role is {shown(role)}; {hint}")
    return {"role": role, "content": content if isinstance(content, str) else _joined(content, f"{where}.content")}


def _joined(content: Any, where: str) -> str:
    """The text of a content in parts."""
    parts = content if isinstance(content, Sequence) else ()
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and _is_text(part)]
    if not texts or len(texts) < len(parts):
        form = '{"type": "text", "text": …}'
        raise MessageRefused(f"{where} is {shown(content)}; give a text, or a list of {form}")
    return "".join(texts)


def _is_text(part: Mapping[Any, Any]) -> bool:
    """Whether a part of a content is a text and nothing more."""
    extra = [name for name, value in part.items() if name not in ("type", "text") and value is not None]
    return part.get("type") == "text" and isinstance(part.get("text"), str) and not extra


def shown(value: Any) -> str:
    """``value`` as JSON, short enough for a line."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
