"""The built-in ``openenv``: environments of the OpenEnv library, on separate servers, over WebSocket.

An episode is one session: ``reset``, then one ``step`` per reply. A session ends with its connection, so a lost one
fails its episode; at a server that is full the next episode waits until one of ours ends, or for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import re
import ssl
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, field_validator, model_validator
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from rookery.aio import in_new_thread
from rookery.bounds import GivenModel, JsonSize, Line, Name, Text
from rookery.environments.base import Environment, Message, Reply, Split, SplitSizes, Step
from rookery.environments.outbound import check_headers, connection, one_line, request_json
from rookery.environments.verifiers.parts import spoken
from rookery.errors import UserError, short
from rookery.network import service_url

RESETS, RESET_BYTES, SERVERS = 100_000, 64 << 10, 64
"""Most prompts, most bytes of one as JSON, most servers."""

FRAME_BYTES = 4 << 20
"""Largest message of a server."""

PAUSE_SECONDS = 0.5
"""Between two attempts at a server that is full of others' sessions."""

CONNECTING = 8
"""Connections of one environment that are made at once, each in a thread: a silent server keeps each for a while."""

AGAIN_SECONDS = 5.0
"""Time after which a server that was full is tried with one more session."""

_OPENING = re.compile(r"```(?:json)?[ \t]*+\n")
_CLOSING = re.compile(r"\n[ \t]*+```")

Arguments = Annotated[dict[str, Any], JsonSize(RESET_BYTES)]


class OpenEnvOptions(GivenModel):
    """Options of ``{id: openenv}``: episodes of a server that speaks OpenEnv's WebSocket protocol. Give `url` or
    `urls`, and `resets` or `split`. The policy reads the observation and the JSON schema of an action, and replies with
    the action as JSON, alone or in a fenced block; where the schema has exactly one required field, a reply that is no
    JSON is its text. Rewards of the steps add up. Metrics: `invalid`, the share of episodes with a reply that the
    server refused, and `steps`. See [OpenEnv](environments.md#openenv)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    url: Line | None = None
    """Address of the server, such as `https://user-space.hf.space`."""
    urls: list[Line] = Field(default_factory=list, max_length=SERVERS)
    """Addresses of several servers of the same environment. A new session goes to the one with the fewest."""
    resets: list[Arguments] = Field(default_factory=list, max_length=RESETS)
    """Arguments of `reset`, one prompt each. `seed` is added where it is missing."""
    eval_resets: list[Arguments] = Field(default_factory=list, max_length=RESETS)
    """Arguments of `reset` for held-out prompts, one each."""
    split: Name | None = None
    """A split of the server's tasks, each one prompt: `reset` gets `split` and `index`."""
    eval_split: Name | None = None
    """A split of the server's tasks that is held out."""
    environment: Name = "default"
    """The name of the environment in the server's list of tasks, for `split`."""
    template: Text | None = None
    """The messages that the policy reads: a text with `{observation}`, and `{action_schema}` where wanted. When absent,
    both as one JSON object."""
    headers: dict[Name, Line] = Field(default_factory=dict, max_length=20)
    """Headers of each connection, such as an `Authorization`. They are stored with the job."""
    reply_seconds: float = Field(30.0, gt=0, le=3600)
    """Longest wait for a server's reply. A late one loses the session."""

    @field_validator("headers")
    @classmethod
    def _can_be_sent(cls, value: dict[str, str]) -> dict[str, str]:
        check_headers(value)
        return value

    @model_validator(mode="after")
    def _one_source(self) -> OpenEnvOptions:
        if (self.url is None) == (not self.urls):
            raise ValueError("exactly one of url and urls")
        if bool(self.resets) == (self.split is not None):
            raise ValueError("exactly one of resets and split")
        if self.eval_resets and self.eval_split is not None:
            raise ValueError("at most one of eval_resets and eval_split")
        if self.template is not None and "{observation}" not in self.template:
            raise ValueError("template contains {observation}")
        return self

    @property
    def servers(self) -> list[str]:
        return [self.url] if self.url is not None else self.urls


class SessionLost(RuntimeError):
    """The session of an episode is gone; one line."""


class ServerSessions:
    """The sessions of one environment, by server. A server that refuses one has as many of ours as are open then: its
    limit. It is tried with one more after a while, and with another one as soon as that works: sessions of others end,
    and a server may count one that we have left until its step has ended."""

    def __init__(self, again_seconds: float = AGAIN_SECONDS) -> None:
        self.connecting = asyncio.Semaphore(CONNECTING)
        self.open: Counter[str] = Counter()
        self.limits: dict[str, int] = {}
        self._again_seconds = again_seconds
        self._again: dict[str, float] = {}
        """When a server at its limit is tried with one more (seconds of the loop)."""
        self._changed = asyncio.Condition()

    async def position(self, servers: Sequence[str]) -> str:
        """A server with room, as far as it is known; counted as open."""
        async with self._changed:
            while True:
                now = asyncio.get_running_loop().time()
                below = [url for url in servers if self.open[url] < self.limits.get(url, self.open[url] + 1)]
                if fitting := below or [url for url in servers if self._again[url] <= now]:
                    url = min(fitting, key=lambda one: self.open[one])
                    self.open[url] += 1
                    if not below:
                        self._again[url] = now + self._again_seconds
                    return url
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(min(self._again[url] for url in servers)):
                        await self._changed.wait()

    async def opened(self, url: str) -> None:
        """The server has accepted the session."""
        async with self._changed:
            if self.open[url] > self.limits.get(url, self.open[url]):
                self.limits[url] = self.open[url]
                self._again[url] = asyncio.get_running_loop().time()
                self._changed.notify()

    async def leave(self, url: str, *, full: bool = False) -> None:
        """The session is over; ``full``: because the server had no room."""
        async with self._changed:
            self.open[url] -= 1
            if full and self.open[url] > 0:
                self.limits[url] = self.open[url]
                self._again[url] = asyncio.get_running_loop().time() + self._again_seconds
            self._changed.notify_all()


class OpenEnv(Environment):
    """One session of a server."""

    def __init__(self, options: OpenEnvOptions, sessions: ServerSessions | None = None) -> None:
        """Asks the first server for its schema and, for a split, for the number of its tasks. ``sessions`` counts those
        of all its episodes. Blocks; raises :class:`UserError`."""
        self._options = options
        self._servers = [service_url(url, f"environment.{_field(options)}").rstrip("/") for url in options.servers]
        first = self._servers[0]
        schema = request_json(f"{first}/schema", f"environment.{_field(options)}", headers=options.headers)
        action = schema.get("action") if isinstance(schema, dict) else None
        if not isinstance(action, dict):
            raise UserError(
                f"environment.{_field(options)}: {short(first)}/schema has no action; is it an OpenEnv server?"
            )
        self._schema: dict[str, Any] = action
        self._tasks = {split: self._count(name) for split, name in self._splits().items()}
        self._sessions = sessions or ServerSessions()
        self._socket: ClientConnection | None = None
        self._server = ""
        self._steps = self._invalid = 0

    def _splits(self) -> dict[str, str]:
        named = {"train": self._options.split, "eval": self._options.eval_split}
        return {split: name for split, name in named.items() if name is not None}

    def _count(self, split: str) -> int:
        url = f"{self._servers[0]}/{self._options.environment}/num_tasks"
        answer = request_json(url, "environment.split", {"split": split}, self._options.headers)
        count = answer.get("num_tasks") if isinstance(answer, dict) else answer
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise UserError(f"environment.split: the server has no tasks in {split!r} ({short(json.dumps(answer))})")
        return min(count, RESETS)

    def sizes(self) -> SplitSizes:
        """The sizes of the splits."""
        train = self._tasks.get("train", len(self._options.resets))
        held_out = self._tasks.get("eval", len(self._options.eval_resets))
        return SplitSizes(train, held_out, held_out_by="environment.eval_resets or eval_split")

    def prompts(self, split: Split) -> Iterable[Any]:
        if split in self._tasks:
            name = self._splits()[split]
            return [{"split": name, "index": index} for index in range(self._tasks[split])]
        return self._options.resets if split == "train" else self._options.eval_resets

    async def reset(self, prompt: Any, seed: int) -> Sequence[Message]:
        arguments = {"seed": seed % (1 << 31), **prompt}
        while True:
            self._server = await self._sessions.position(self._servers)
            try:
                answer = await self._first(arguments)
            except BaseException:
                await self._leave()
                raise
            if answer is not None:
                await self._sessions.opened(self._server)
                return [{"role": "user", "content": self._shown(answer)}]
            await self._leave(full=True)
            await asyncio.sleep(PAUSE_SECONDS)

    async def step(self, reply: Reply) -> Step:
        text = spoken(reply.text, reply.raw, reply.special)
        action = self._action(text) if text is not None else None
        answer = await self._ask({"type": "step", "data": action}) if action is not None else None
        self._steps += 1
        refusal = _refusal(answer) if action is not None else "The reply is no JSON object."
        if answer is None or refusal:
            self._invalid = 1
            text = f"{refusal} Reply with an action as JSON: {json.dumps(self._schema)}"
            return Step(messages=[{"role": "user", "content": text}], metrics=self._metrics())
        data = answer.get("data") or {}
        done, reward = data.get("done"), data.get("reward")
        if not isinstance(done, bool | None):
            raise await self._lost(f"done is neither true nor false, but {json.dumps(done)}")
        if not isinstance(reward, bool | int | float | None):
            raise await self._lost(f"the reward is no number, but {json.dumps(reward)}")
        done = bool(done)
        messages = [] if done else [{"role": "user", "content": self._shown(answer)}]
        return Step(messages, float(reward) if reward is not None else 0.0, done, self._metrics())

    async def close(self) -> None:
        await self._leave()

    def for_episode(self) -> Environment:
        return copy.copy(self)  # the sessions are counted together

    def _metrics(self) -> dict[str, float]:
        return {"invalid": float(self._invalid), "steps": float(self._steps)}

    async def _first(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer to ``reset`` in a new session; None where the server is full."""
        async with self._sessions.connecting:
            plain = await in_new_thread(connection, self._server, f"environment.{_field(self._options)}")
        plain.setblocking(False)
        parts = urlsplit(self._server)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        address = service_url(self._server, "environment.url", "ws", "/ws")
        try:
            self._socket = await connect(
                address, sock=plain, ssl=tls, proxy=None, additional_headers=self._options.headers,
                max_size=FRAME_BYTES, open_timeout=self._options.reply_seconds,
            )  # fmt: skip
        except (OSError, TimeoutError, ValueError, WebSocketException) as error:  # ValueError: a redirect
            plain.close()
            why = one_line(str(error)) or "no reply"
            raise SessionLost(f"openenv: {short(self._server)} opens no session ({why})") from None
        answer = await self._ask({"type": "reset", "data": arguments}, first=True)
        if _code(answer) == "CAPACITY_REACHED":
            return None
        if refusal := _refusal(answer):
            raise UserError(f"openenv: reset was refused: {refusal}")
        return answer

    async def _ask(self, message: Mapping[str, Any], *, first: bool = False) -> dict[str, Any]:
        assert self._socket is not None
        try:
            async with asyncio.timeout(self._options.reply_seconds):
                try:
                    await self._socket.send(json.dumps(message))
                except ConnectionClosed:
                    if not first:
                        raise  # a full server has closed it after a message that says so
                answer = json.loads(await self._socket.recv())
        except TimeoutError:
            raise await self._lost(f"it did not reply within {self._options.reply_seconds:g} s") from None
        except (ConnectionClosed, OSError) as error:
            raise await self._lost(f"{error}") from None
        except ValueError:
            raise await self._lost("it sent no JSON") from None
        if not isinstance(answer, dict):
            raise await self._lost("it sent no JSON object")
        return answer

    async def _lost(self, why: str) -> SessionLost:
        server = self._server
        await self._leave()
        return SessionLost(f"openenv: the session at {short(server)} is lost: {short(why)}")

    async def _leave(self, *, full: bool = False) -> None:
        """Ends the session, if there is one."""
        server, socket, self._server, self._socket = self._server, self._socket, "", None
        try:
            if socket is not None:
                with contextlib.suppress(ConnectionClosed):
                    await socket.send('{"type": "close"}')
                await socket.close()
        finally:  # a silent server may keep the close waiting until it is cancelled
            if server:
                await self._sessions.leave(server, full=full)

    def _shown(self, answer: Mapping[str, Any]) -> str:
        """An observation as the policy reads it."""
        data = answer.get("data") or {}
        observation = data.get("observation", data)
        if self._options.template is None:
            return json.dumps({"observation": observation, "action_schema": self._schema}, ensure_ascii=False)
        text = observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
        schema = json.dumps(self._schema, ensure_ascii=False)
        parts = {"{observation}": text, "{action_schema}": schema}
        return re.sub(r"\{observation\}|\{action_schema\}", lambda found: parts[found[0]], self._options.template)

    def _action(self, reply: str) -> dict[str, Any] | None:
        """The action in a reply; None where there is none."""
        for text in (reply, *reversed(fenced_texts(reply))):
            try:
                action = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(action, dict):
                return action
        required = self._schema.get("required") or []
        return {required[0]: reply.strip()} if len(required) == 1 else None


def fenced_texts(reply: str) -> list[str]:
    """The texts of a reply's fenced blocks, of JSON or of no language. Linear: it runs in the loop of all episodes."""
    found: list[str] = []
    position = 0
    while (opening := _OPENING.search(reply, position)) is not None:
        closing = _CLOSING.search(reply, opening.end())
        if closing is None:  # nor has a later block an end
            break
        found.append(reply[opening.end() : closing.start()])
        position = closing.end()
    return found


def _field(options: OpenEnvOptions) -> str:
    return "url" if options.url is not None else "urls.0"


def _code(answer: Mapping[str, Any] | None) -> str:
    """The code of an error; empty for another answer."""
    if answer is None or answer.get("type") != "error":
        return ""
    data = answer.get("data")
    return str(data.get("code") or "ERROR") if isinstance(data, dict) else "ERROR"


def _refusal(answer: Mapping[str, Any] | None) -> str:
    """Why the server refused a message, in one line; empty for an answer."""
    if answer is None or not _code(answer):
        return ""
    data = answer.get("data")
    message = data.get("message") if isinstance(data, dict) else data
    return f"{_code(answer)}: {short(' '.join(str(message).split()))}"
