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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, field_validator

from rookery.bounds import INTEGER, GivenModel, JsonSize, Line, Name
from rookery.environments.base import Environment, Reply, Split, Step
from rookery.environments.foreign.pool import LibraryProcesses
from rookery.environments.foreign.process import (
    Installed,
    LibraryFailed,
    LibraryProcess,
    parse_installed,
)
from rookery.errors import UserError
from rookery.protocol import MOST_POLICIES

TASKS, CONFIG_BYTES = 100_000, 64 << 10
"""Most tasks of a package, and most bytes of a job's ``config`` as JSON."""

PROCESS = Path(__file__).with_name("verifiers_process.py")

Config = Annotated[dict[str, Any], JsonSize(CONFIG_BYTES)]


_installed: Installed | None = None


def parse_verifiers(text: str) -> Installed | None:
    """The setting ``verifiers``. Raises :class:`UserError`."""
    return parse_installed(text, "ROOKERY_VERIFIERS", "PACKAGE", "verifiers and the packages")


def set_verifiers(text: str) -> None:
    """Set the packages that jobs may use. Called once when a process starts."""
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


class VerifiersOptions(GivenModel):
    """Options of ``{id: verifiers}``: tasks and rewards of an environment package for verifiers 0.4 that the
    administrator has installed. The environment drives: it calls the policy as often as it likes, at most `max_turns`
    times, and each of its replies is trained on. Metrics: the environment's, and `reward_NAME` for each of its
    rewards. See [verifiers](environments.md#verifiers)."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    package: Name
    """A package of `ROOKERY_VERIFIERS`."""
    config: Config = Field(default_factory=dict)
    """The environment's configuration, as under `[env]` of verifiers: `taskset` with the fields of the package that are
    numbers or choices, `id` of another environment for its tasks, and for each role `max_turns`, `timeout`, limits of
    tokens, `harness: {id}`."""
    agent: Name | None = None
    """The role whose replies are trained, where there are several: the policy of its name, or else the one that trains.
    Each other role is a policy of the job with its name, such as a frozen one."""
    eval_last: int = Field(0, ge=0, le=INTEGER)
    """Number of tasks at the end that are held out from training."""
    tokenizer: Line | None = None
    """Filled in by the service."""
    policies: list[Name] | None = Field(None, max_length=MOST_POLICIES)
    """Filled in by the service."""
    trained: list[Name] = Field(default_factory=list, max_length=MOST_POLICIES)
    """Filled in by the service."""

    @field_validator("package")
    @classmethod
    def _is_named(cls, value: str) -> str:
        installed = require_verifiers()
        if value not in installed.names:
            raise ValueError(f"one of the administrator's: {', '.join(installed.names)}")
        return value


def policy_of(agent: str, others: Sequence[str], policies: Sequence[str], trained: Sequence[str]) -> str:
    """The policy that plays the trained role ``agent``, of the job's ``policies``, of which some are ``trained``; each
    of the ``others`` is played by the one of its name. Raises :class:`UserError`."""
    if agent in policies:
        return agent
    free = [name for name in trained if name not in others]
    if len(free) == 1:
        return free[0]
    fault = f"{', '.join(free)} could all play it" if free else "no policy that trains is left for it"
    raise UserError(f"environment.agent: {fault}; name a policy {agent}, as the role that is trained")


CUT = "no further reply is given ({finish}), as if the maximum context length were reached"
"""The error of a call that gets no reply. By the last words the library ends the rollout in order, and scores it."""


class Verifiers(Environment):
    """One episode of an environment of verifiers."""

    scores_when_cut = True

    def __init__(self, options: VerifiersOptions) -> None:
        """Starts the environment's process. Blocks; raises :class:`UserError`."""
        installed = require_verifiers()
        given = {
            "package": options.package, "config": options.config, "agent": options.agent, "most": TASKS,
            "tokenizer": options.tokenizer, "packages": installed.names,
        }  # fmt: skip
        self._processes = LibraryProcesses("verifiers", installed.python, PROCESS, given)
        ready = self._processes.ready
        others = [role for role in ready["roles"] if role != ready["agent"]]
        missing = [role for role in others if options.policies is not None and role not in options.policies]
        if missing:
            raise UserError(
                f"environment.package: the environment has the roles {', '.join(ready['roles'])}; each but"
                f" {ready['agent']} is a policy of the job with its name: add policies.{missing[0]}, such as"
                f" {{{missing[0]}: {{train: false, base: true}}}}"
            )
        self._policy, self._trained = "", options.trained
        if options.policies is not None:
            self._policy = policy_of(ready["agent"], others, options.policies, options.trained)
        tasks: list[dict[str, Any]] = ready["tasks"]
        if options.eval_last >= len(tasks):
            raise UserError(
                f"environment.eval_last: given {options.eval_last}, allowed: less than the {len(tasks)} tasks"
            )
        train = len(tasks) - options.eval_last
        self._splits = {"train": tasks[:train], "eval": tasks[train:]}
        self._process: LibraryProcess | None = None
        self._inbox: asyncio.Queue[dict[str, Any]] | None = None
        self._name, self._call = "", -1
        self._spoken: set[str] = set()
        """The policies that were asked."""

    def prompts(self, split: Split) -> Iterable[Any]:
        return self._splits[split]

    async def reset(self, prompt: Any, seed: int) -> Step:
        process = self._process = await self._processes.join()
        self._name, self._spoken = self._processes.next_name(), set()
        self._inbox = process.listen(self._name)
        process.send({"run": self._name, "task": prompt})
        step = await self._next()
        if step.done:
            raise LibraryFailed("verifiers: the episode ended without a call of the model")
        return step

    async def step(self, reply: Reply) -> Step:
        assert self._process is not None
        if not reply.tokens:
            return await self._cut(reply.finish)
        answer = {"tokens": list(reply.tokens), "logprobs": list(reply.logprobs), "finish": reply.finish}
        self._process.send({"reply": self._call, **answer})
        return await self._next()

    async def _cut(self, finish: str) -> Step:
        """The end of an episode that gets no further reply: none of its calls does."""
        assert self._process is not None
        while True:
            self._process.send({"reply": self._call, "error": CUT.format(finish=finish)})
            step = await self._next()
            if step.done:
                return step

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.forget(self._name)
            with contextlib.suppress(LibraryFailed):
                process.send({"cancel": self._name})
            self._processes.leave(process)

    def for_episode(self) -> Environment:
        return copy.copy(self)  # the process is shared

    async def _next(self) -> Step:
        """The next action of the environment: a call of the model, or its end."""
        assert self._inbox is not None and self._process is not None
        message = await self._inbox.get()
        if "error" in message:
            raise LibraryFailed(message["error"])
        if "ended" in message:
            return self._end(message["reward"], message["rewards"], message["metrics"])
        self._call, role = message["call"], message["role"]
        policy = self._policy if role in (None, self._process.ready["agent"]) else role
        self._spoken.add(policy)
        return Step(tokens=message["tokens"], policy=policy)

    def _end(self, reward: float, rewards: Mapping[str, float], metrics: dict[str, float]) -> Step:
        """The end of an episode with the ``reward`` of the trained role. Another role that trains gets its own, where
        the environment has ``rewards`` for it."""
        others = [role for role in rewards if role in self._trained and role in self._spoken and role != self._policy]
        return Step([], reward, True, metrics, rewards={role: rewards[role] - reward for role in others})
