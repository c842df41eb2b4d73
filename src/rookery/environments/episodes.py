"""The live episodes of one environment host.

* Calls on one environment never overlap, and each turn happens once: its result is kept, and a repeated call for that
  turn is answered with it.
* An exception or an invalid result of an environment is the answer of that call, in one line.
* An episode lives until the controller closes it, including episodes that a host still has after a reconnection. No
  episode is closed to make room for others, which may be other tenants'.
"""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rookery import protocol
from rookery.environments import user_code
from rookery.environments.base import Environment, Message, Reply, Step
from rookery.environments.user_code import UserCodeExecutor, cancellable
from rookery.errors import UserError

log = logging.getLogger("rookery.environments")

CLOSE_SECONDS = 5.0
"""Time that an ending host waits for environments to close."""

_PACKAGE = str(Path(__file__).parent.parent)


@dataclass
class _Episode:
    """``turns[0]`` is the reset, ``turns[k + 1]`` the step on reply k; each task keeps its result."""

    job: str
    threads: asyncio.Semaphore
    environment: Environment | None = None
    turns: list[asyncio.Task[protocol.Observation]] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    cancellable: bool = False
    """The running method can be cancelled."""
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class Episodes:
    def __init__(
        self, calls: UserCodeExecutor, prototype: Callable[[str, dict[str, Any]], Awaitable[Environment]]
    ) -> None:
        """``prototype(name, options)`` returns the environment that episodes are copied from."""
        self._calls = calls
        self._prototype = prototype
        self._live: dict[str, _Episode] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def ids(self) -> list[str]:
        return list(self._live)

    def reset(self, message: protocol.Reset) -> asyncio.Task[protocol.Observation]:
        """The task of the episode's reset, started or running; the caller fills in ``call``."""
        episode = self._live.get(message.episode)
        if episode is None:
            episode = self._live[message.episode] = _Episode(message.job, self._calls.thread_limit(message.job))
            self._play(episode, message.episode, self._begin(episode, message))
        return episode.turns[0]

    def step(self, message: protocol.StepEpisode) -> asyncio.Task[protocol.Observation]:
        """The task of the step on this reply. Raises :class:`UserError` for a turn that cannot follow."""
        episode = self._live.get(message.episode)
        if episode is None:
            raise UserError("the episode is not alive in this environment host")
        turn = len(episode.replies)
        if message.turn < turn:
            if episode.replies[message.turn] != message.tokens:
                raise UserError(f"turn {message.turn} was answered for another reply; an environment cannot go back")
            return episode.turns[message.turn + 1]
        last = episode.turns[-1]
        if message.turn > turn or not last.done():
            raise UserError(f"turn {message.turn} came while the episode is at turn {turn}")
        if last.cancelled() or last.result().error or last.result().done:
            raise UserError(f"turn {message.turn} came after the episode's end")
        episode.replies.append(message.tokens)
        self._play(episode, message.episode, self._advance(episode, message))
        return episode.turns[-1]

    def close(self, name: str) -> None:
        """Removes the episode; its environment is closed when its running method has ended."""
        episode = self._live.pop(name, None)
        if episode is not None:
            self._keep(asyncio.create_task(self._finish(episode, name)))

    async def close_all(self) -> None:
        """Closes all episodes, waiting at most :data:`CLOSE_SECONDS`."""
        for name in self.ids():
            self.close(name)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        unfinished = list(self._tasks)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _play(self, episode: _Episode, name: str, turn: Coroutine[Any, Any, Step]) -> None:
        task = asyncio.create_task(self._observe(episode, name, turn))
        episode.turns.append(task)
        self._keep(task)

    async def _observe(self, episode: _Episode, name: str, turn: Coroutine[Any, Any, Step]) -> protocol.Observation:
        observed = protocol.Observation(epoch=0, call="", episode=name)
        async with episode.busy:
            try:
                step = await turn
                observed.messages = [
                    protocol.ChatMessage(role=message["role"], content=message["content"]) for message in step.messages
                ]
                observed.reward, observed.done, observed.metrics = step.reward, step.done, step.metrics
            except Exception as error:  # user code raised: the error is this call's answer
                log.warning("episode %s failed", name, exc_info=error, extra={"job": episode.job})
                observed.error = describe_error(error)
            finally:
                episode.cancellable = False
        return observed

    async def _begin(self, episode: _Episode, message: protocol.Reset) -> Step:
        prototype = await self._prototype(message.environment, message.options)
        prompt = json.loads(message.prompt)
        environment = await self._calls(episode.threads, prototype.for_episode)
        environment.prompt, environment.seed = prompt, message.seed
        episode.environment = environment
        messages = await self._run(episode, environment.reset, prompt, message.seed)
        return Step(messages=_checked(messages, "reset"))

    async def _advance(self, episode: _Episode, message: protocol.StepEpisode) -> Step:
        environment = episode.environment
        assert environment is not None  # the reset was answered without an error
        conversation = [{"role": turn.role, "content": turn.content} for turn in message.messages]
        reply = Reply(text=message.text, tokens=message.tokens, messages=conversation, turn=message.turn)
        step = await self._run(episode, environment.step, reply)
        if not isinstance(step, Step):
            raise TypeError(f"step returned {type(step).__name__}, not a rookery.Step")
        metrics = {str(name): float(value) for name, value in step.metrics.items()}
        "".join(metrics).encode()  # as in _checked
        return Step(_checked(step.messages, "step"), float(step.reward), bool(step.done), metrics)

    async def _run(self, episode: _Episode, method: Callable[..., Any], *arguments: Any) -> Any:
        episode.cancellable = cancellable(method)
        return await self._calls(episode.threads, method, *arguments)

    async def _finish(self, episode: _Episode, name: str) -> None:
        if episode.cancellable:
            episode.turns[-1].cancel()
        async with episode.busy:  # a running plain method finishes first: calls never overlap
            if episode.environment is not None:
                try:
                    await self._calls(episode.threads, episode.environment.close)
                except Exception as error:  # user code raised; the episode is over
                    log.warning("closing episode %s failed", name, exc_info=error, extra={"job": episode.job})


def describe_error(error: BaseException) -> str:
    """One line: the exception's type and text and, for an error in user code, its place."""
    if isinstance(error, UserError):
        return one_line(error)
    text = f"{type(error).__name__}: {one_line(error)}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    entry = max((place + 1 for place, frame in enumerate(frames) if frame.filename == user_code.__file__), default=0)
    user_frames = [frame for frame in frames[entry:] if not frame.filename.startswith(_PACKAGE)]
    if user_frames:
        place = [frame for frame in user_frames if frame.filename == user_frames[0].filename][-1]
        text += f" ({place.filename}:{place.lineno} in {place.name})"
    return text


def one_line(error: BaseException) -> str:
    text = str(error).encode("utf-8", "replace").decode()
    return " ".join(text.split()) or type(error).__name__


def _checked(messages: Any, method: str) -> list[Message]:
    expected = 'a list of {"role": …, "content": …}'
    if isinstance(messages, str | bytes | Mapping) or not hasattr(messages, "__iter__"):
        raise TypeError(f"{method} gave {type(messages).__name__} for messages, not {expected}")
    checked = []
    for number, message in enumerate(messages):
        fine = isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not fine:
            raise TypeError(f"message {number} that {method} gave is {message!r:.80}, expected {expected}")
        checked.append({key: message[key] for key in ("role", "content")})
        "".join(checked[-1].values()).encode()  # invalid Unicode fails here, as this call's error
    if method == "reset" and not checked:
        raise TypeError(f"reset gave no messages, expected {expected}")
    return checked
