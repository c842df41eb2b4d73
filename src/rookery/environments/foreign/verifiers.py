"""The built-in ``verifiers``: environments of the library verifiers 0.4, which drive the policy themselves.

:mod:`rookery.environments.foreign.verifiers_process` runs them, in the virtual environment that the administrator
names. Where a rollout calls the model, its token ids are the next observation of the episode, and the policy's token
ids and log-probabilities are the answer: nothing is rendered or tokenized again. Calls of one episode are answered one
after the other; each continues the sequence whose beginning it has, or begins another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
import os
import subprocess
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rookery.bounds import INTEGER, JsonSize, Line, Name
from rookery.environments.base import Environment, Reply, Split, Step
from rookery.errors import UserError, short

TASKS, CONFIG_BYTES = 100_000, 64 << 10
"""Most tasks of a package, and most bytes of a job's ``config`` as JSON."""

PROCESS = Path(__file__).with_name("verifiers_process.py")

Config = Annotated[dict[str, Any], JsonSize(CONFIG_BYTES)]


@dataclass(frozen=True)
class Installed:
    """The virtual environment with verifiers, and the packages in it that jobs may name."""

    python: str
    packages: tuple[str, ...]


_installed: Installed | None = None


def parse_verifiers(text: str) -> Installed | None:
    """The setting ``verifiers``. Raises :class:`UserError`."""
    parts = text.split()
    if not parts:
        return None
    if len(parts) < 2 or not Path(parts[0]).is_absolute():
        raise UserError(
            f"setting ROOKERY_VERIFIERS: given {short(text)!r}, allowed: PYTHON PACKAGE [PACKAGE …], where PYTHON is"
            " the path of the interpreter that has verifiers and the packages"
        )
    return Installed(parts[0], tuple(parts[1:]))


def set_verifiers(text: str) -> None:
    """What jobs may use. Called once when a process starts."""
    global _installed
    _installed = parse_verifiers(text)


def require_verifiers() -> Installed:
    """Raises :class:`UserError` where the administrator named none."""
    if _installed is None:
        raise UserError(
            "environment.id: verifiers is not set up; the administrator names its interpreter and packages in"
            " ROOKERY_VERIFIERS"
        )
    return _installed


class VerifiersOptions(BaseModel):
    """Options of ``{id: verifiers}``: tasks and rewards of an environment package for verifiers 0.4 that the
    administrator has installed. The environment drives: it calls the policy as often as it likes, at most `max_turns`
    times, and each of its replies is trained on. Metrics: the environment's, and `reward_NAME` for each of its
    rewards. See [verifiers](environments.md#verifiers)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    package: Name
    """A package of `ROOKERY_VERIFIERS`."""
    config: Config = Field(default_factory=dict)
    """The environment's configuration, as under `[env]` of verifiers: `taskset` with the fields of the package, `id` of
    another environment for its tasks, and for each role `max_turns`, `timeout`, limits of tokens, `harness: {id}`."""
    agent: Name | None = None
    """The role whose replies are trained, where there are several. Each other role is a policy of the job with its
    name, such as a frozen one."""
    eval_last: int = Field(0, ge=0, le=INTEGER)
    """Number of tasks at the end that are held out from training."""
    tokenizer: Line | None = None
    """Filled in by the service."""

    @field_validator("package")
    @classmethod
    def _is_named(cls, value: str) -> str:
        installed = require_verifiers()
        if value not in installed.packages:
            raise ValueError(f"one of the administrator's: {', '.join(installed.packages)}")
        return value


class VerifiersFailed(RuntimeError):
    """An episode, or the process of all, failed; one line."""


class _Process:
    """The process of one environment. Its messages about an episode are put where that episode waits."""

    def __init__(self, options: VerifiersOptions) -> None:
        """Returns when the environment serves. Blocks; raises :class:`UserError`."""
        installed = require_verifiers()
        given = {
            "package": options.package, "config": options.config, "agent": options.agent, "most": TASKS,
            "tokenizer": options.tokenizer,
        }  # fmt: skip
        binaries = str(Path(installed.python).parent)  # with uv, which starts the environment's programs
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROOKERY_")}
        environment["PATH"] = f"{binaries}:{os.environ.get('PATH', '/usr/bin:/bin')}"
        environment.pop("PYTHONPATH", None)
        try:
            self._process = subprocess.Popen(
                [installed.python, "-I", str(PROCESS), json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            raise UserError(f"verifiers: {installed.python} does not start ({error.strerror})") from None
        self._end = weakref.finalize(self, _end, self._process)
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[dict[str, Any]]]] = {}
        assert self._process.stdout is not None
        first = self._read(self._process.stdout.readline())
        if "refused" in first:
            self._end()
            raise UserError(f"environment.{first['refused']}")
        self.tasks: list[dict[str, Any]] = first["tasks"]
        self.agent: str = first["agent"]
        process, waiting = self._process, self._waiting  # not self, which the thread would keep alive
        threading.Thread(target=_deliver, args=(process, waiting), daemon=True, name="verifiers").start()

    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises :class:`VerifiersFailed`."""
        assert self._process.stdin is not None
        line = json.dumps(message) + "\n"
        with self._lock:
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except (OSError, ValueError):
                raise VerifiersFailed("verifiers: its process has ended") from None

    def listen(self, episode: str) -> asyncio.Queue[dict[str, Any]]:
        """Where the messages about an episode arrive, in the running loop."""
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._waiting[episode] = (asyncio.get_running_loop(), inbox)
        return inbox

    def forget(self, episode: str) -> None:
        self._waiting.pop(episode, None)

    @staticmethod
    def _read(line: str) -> dict[str, Any]:
        if not line:
            return {"refused": "package: its process ended as it started; see the service's standard error"}
        message: dict[str, Any] = json.loads(line)
        return message


def _deliver(
    process: subprocess.Popen[str],
    waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[dict[str, Any]]]],
) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # closed
        for line in process.stdout:
            message = json.loads(line)
            put(waiting.get(message.get("episode") or message.get("ended")), message)
    ended = {"error": f"verifiers: its process ended with {process.wait()}"}
    for one in list(waiting.values()):
        put(one, ended)


def put(where: tuple[asyncio.AbstractEventLoop, asyncio.Queue[dict[str, Any]]] | None, message: dict[str, Any]) -> None:
    """Gives a message to an episode that waits in a loop, from a thread."""
    if where is not None:
        loop, inbox = where
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(inbox.put_nowait, message)


def _end(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            if pipe is not None:
                pipe.close()  # it ends with its input


class _Processes:
    """The process of one environment, started again where it has ended. Thread-safe; blocks."""

    def __init__(self, options: VerifiersOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self.episodes = itertools.count()

    def get(self) -> _Process:
        with self._lock:
            if self._process is None or not self._process.alive():
                self._process = _Process(self._options)
            return self._process


class Verifiers(Environment):
    """One episode of an environment of verifiers."""

    def __init__(self, options: VerifiersOptions) -> None:
        """Starts the environment's process. Blocks; raises :class:`UserError`."""
        self._processes = _Processes(options)
        tasks = self._processes.get().tasks
        if options.eval_last >= len(tasks):
            raise UserError(
                f"environment.eval_last: given {options.eval_last}, allowed: less than the {len(tasks)} tasks"
            )
        train = len(tasks) - options.eval_last
        self._splits = {"train": tasks[:train], "eval": tasks[train:]}
        self._process: _Process | None = None
        self._inbox: asyncio.Queue[dict[str, Any]] | None = None
        self._name, self._call = "", -1

    def prompts(self, split: Split) -> Iterable[Any]:
        return self._splits[split]

    async def reset(self, prompt: Any, seed: int) -> Step:
        process = self._process = await asyncio.get_running_loop().run_in_executor(None, self._processes.get)
        self._name = f"episode-{next(self._processes.episodes)}"
        self._inbox = process.listen(self._name)
        process.send({"run": self._name, "task": prompt})
        step = await self._next()
        if step.done:
            raise VerifiersFailed("verifiers: the episode ended without a call of the model")
        return step

    async def step(self, reply: Reply) -> Step:
        assert self._process is not None
        answer = {"tokens": list(reply.tokens), "logprobs": list(reply.logprobs), "finish": reply.finish}
        self._process.send({"reply": self._call, **answer})
        return await self._next()

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.forget(self._name)
            with contextlib.suppress(VerifiersFailed):
                process.send({"cancel": self._name})

    def for_episode(self) -> Environment:
        return copy.copy(self)  # the process is shared

    async def _next(self) -> Step:
        """What the environment does next: a call of the model, or its end."""
        assert self._inbox is not None and self._process is not None
        message = await self._inbox.get()
        if "error" in message:
            raise VerifiersFailed(message["error"])
        if "ended" in message:
            return Step(reward=message["reward"], done=True, metrics=message["metrics"])
        self._call, role = message["call"], message["role"]
        policy = "" if role in (None, self._process.agent) else role
        return Step(tokens=message["tokens"], policy=policy)
