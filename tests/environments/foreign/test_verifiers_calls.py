"""The token face of verifiers: no call waits for ever."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rookery.environments.foreign.verifiers_process import EPISODE, EPISODE_ENDED, Lines, TokenFace


class Sent(Lines):
    """Keeps the lines."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def send(self, message: dict[str, Any]) -> None:
        self.queue.put(message)


@pytest.fixture
def face() -> Iterator[TokenFace]:
    with TokenFace(Sent(), "key") as face:
        yield face


def call(face: TokenFace, episode: str) -> tuple[threading.Thread, list[dict[str, Any]], int]:
    """A call that waits: its thread, its reply when it comes, its number."""
    replies: list[dict[str, Any]] = []
    body = {"token_ids": [1], "sampling_params": {EPISODE: episode}}
    thread = threading.Thread(target=lambda: replies.append(face.asked(body)), daemon=True)
    thread.start()
    assert isinstance(face.lines, Sent)
    return thread, replies, face.lines.queue.get(timeout=20)["call"]


@pytest.mark.parametrize("sampling", [{}, {EPISODE: "never"}, {EPISODE: "before"}, None])
def test_a_call_of_no_running_episode_is_answered_at_once(face: TokenFace, sampling: Any) -> None:
    face.begin("before")
    face.end("before")
    assert face.asked({"token_ids": [1], "sampling_params": sampling})["error"] == EPISODE_ENDED


def test_the_end_of_an_episode_answers_its_calls_alone(face: TokenFace) -> None:
    face.begin("one")
    face.begin("two")
    ended, others = [call(face, "one"), call(face, "one")], call(face, "two")
    face.end("one")
    for thread, replies, number in ended:
        thread.join(20)
        assert replies == [{"reply": number, "error": EPISODE_ENDED}]
        face.answer({"reply": number, "tokens": []})  # late: nobody waits
    assert others[0].is_alive() and not others[1]
    answer = {"reply": others[2], "tokens": [3]}
    face.answer(answer)
    others[0].join(20)
    assert others[1] == [answer]
