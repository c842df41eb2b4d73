"""The live episodes of one environment host, and the threads that run users' methods.

* Calls on one environment never overlap, and each turn happens once: its result is kept, and a repeated call for that
  turn is answered with it.
* An exception or an invalid result of an environment is the answer of that call, in one line.
* An episode lives until the controller closes it, including episodes that a host still has after a reconnection. No
  episode is closed to make room for others, which may be other tenants'. Of a closed one no further method begins.
* Plain methods run in daemon threads, a bounded number per job; a stuck one does not keep the process alive. ``async``
  methods run on a separate event loop, in which tenants take turns; a blocking one delays other ``async`` methods and
  nothing else.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import operator
import threading
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rookery import protocol
from rookery.aio import cancel_all, in_new_thread
from rookery.environments.agent import LLM, Agent, Outcome
from rookery.environments.base import Environment, Message, Reply, Step
from rookery.environments.failures import FailureLog
from rookery.environments.messages import MessageRefused, conversation
from rookery.environments.models import AsksModels, ModelAnswer, ModelQuestion
from rookery.errors import UserError, short
from rookery.spec import values
from rookery.tenant_loop import TenantLoop
from rookery.turns import work_of

log = logging.getLogger("rookery.environments")

CLOSE_SECONDS = 5.0
"""Time that an ending host waits for environments to close."""

THREADS_PER_JOB = 64
"""Plain methods of one job that run at the same time; more queue. A method that never returns keeps its thread, so this
also bounds the threads of a broken environment."""

LONGEST_ERROR = 2000
"""Characters of an exception's text that the service is sent."""

LONGEST_POLICY = 64
"""Characters of a policy's name in a job."""

JOIN_SECONDS = 1.0
"""Time that closing waits for the event loop; a loop blocked by user code is abandoned."""

MESSAGES = 'a list of {"role": …, "content": …}'

_PACKAGE = str(Path(__file__).parent.parent)


CallState = Literal["idle", "building", "queued", "running", "awaiting"]
"""No call is under way, or its environment is built, now also for others; or its method waits for a thread, runs in
one, or is awaited in the event loop. A running one cannot be cancelled."""


@dataclass
class CallProgress:
    """The state of the service's last call for one episode, or of one for prompts."""

    call: str
    report: Callable[[str, bool], None]
    """Called with the call when its method begins to wait for a thread (true), and when it has one."""
    state: CallState = "idle"

    @property
    def cancellable(self) -> bool:
        return self.state not in ("idle", "running")

    def change(self, state: CallState) -> None:
        """The call is in this state now."""
        before, self.state = self.state, state
        if (before == "queued") != (state == "queued"):
            self.report(self.call, state == "queued")

    def follow(self, call: str) -> None:
        """The next call, or the same one again."""
        self.call = call
        if self.state == "queued":
            self.report(call, True)

    def end(self) -> None:
        """The call is answered, or was cancelled: there is nothing to report of it."""
        self.state = "idle"


@dataclass
class _Episode:
    """``turns[0]`` is the reset, ``turns[k + 1]`` the step on reply k; each task keeps its result."""

    job: str
    tenant: str
    threads: asyncio.Semaphore
    progress: CallProgress
    environment: Environment | None = None
    turns: list[asyncio.Task[protocol.Observation]] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    closed: bool = False
    """No further method begins, but for ``close``."""
    working: bool = False
    """Its agent runs."""
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)


class Episodes:
    def __init__(
        self,
        calls: UserCodeExecutor,
        prototype: Callable[[str, dict[str, Any]], Awaitable[Environment]],
        ask: Callable[[str, ModelQuestion], ModelAnswer],
        llm: Callable[[protocol.Reset], LLM],
        started: Callable[[str], None],
        queued: Callable[[str, bool], None],
    ) -> None:
        """``prototype(name, options)`` returns the environment that episodes are copied from; ``ask(job, question)``
        blocks until a model has answered; ``llm(reset)`` is the model of an agent's episode; ``started(episode)`` is
        called when its agent runs, and again for a repeated reset; ``queued`` is as :attr:`CallProgress.report`."""
        self._calls = calls
        self._started = started
        self._queued = queued
        self._llm = llm
        self._prototype = prototype
        self._ask = ask
        self.failures = FailureLog(log)
        self._live: dict[str, _Episode] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def ids(self) -> list[str]:
        return list(self._live)

    def reset(self, message: protocol.Reset) -> asyncio.Task[protocol.Observation]:
        """The task of the episode's reset, started or running; the caller fills in ``call``."""
        episode = self._live.get(message.episode)
        if episode is None:
            threads, progress = self._calls.thread_limit(message.job), CallProgress(message.call, self._queued)
            episode = _Episode(message.job, message.tenant, threads, progress)
            self._live[message.episode] = episode
            self._play(episode, message.episode, self._begin(episode, message))
        elif not episode.replies:
            episode.progress.follow(message.call)
        if episode.working:
            self._started(message.episode)
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
            if message.turn + 1 == turn:
                episode.progress.follow(message.call)
            return episode.turns[message.turn + 1]
        last = episode.turns[-1]
        if message.turn > turn or not last.done():
            raise UserError(f"turn {message.turn} came while the episode is at turn {turn}")
        if last.cancelled() or last.result().error or last.result().done:
            raise UserError(f"turn {message.turn} came after the episode's end")
        episode.replies.append(message.tokens)
        episode.progress.follow(message.call)
        self._play(episode, message.episode, self._advance(episode, message))
        return episode.turns[-1]

    def close(self, name: str) -> None:
        """Removes the episode; its environment is closed when its running method has ended. One that waits for a thread
        does not begin."""
        episode = self._live.pop(name, None)
        if episode is not None:
            episode.closed = True
            with work_of(episode.tenant):
                self._keep(asyncio.create_task(self._finish(episode, name)))

    async def close_all(self) -> None:
        """Closes all episodes, waiting at most :data:`CLOSE_SECONDS`."""
        for name in self.ids():
            self.close(name)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        await cancel_all(*self._tasks)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _play(self, episode: _Episode, name: str, turn: Coroutine[Any, Any, Step]) -> None:
        with work_of(episode.tenant):
            task = asyncio.create_task(self._observe(episode, name, turn))
        episode.turns.append(task)
        self._keep(task)

    async def _observe(self, episode: _Episode, name: str, turn: Coroutine[Any, Any, Step]) -> protocol.Observation:
        observed = protocol.Observation(call="", episode=name)
        async with episode.busy:
            try:
                step = await turn
                observed.messages = [
                    protocol.ChatMessage(role=message["role"], content=message["content"]) for message in step.messages
                ]
                observed.reward, observed.done, observed.metrics = step.reward, step.done, step.metrics
                observed.rewards, observed.policy = step.rewards, step.policy
                observed.tokens = list(step.tokens)
                observed.scores_when_cut = episode.environment is not None and episode.environment.scores_when_cut
            except Exception as error:  # user code raised: the error is this call's answer
                self.failures.report(f"episode {name}", episode.job, error)
                observed.error = describe_error(error)
            finally:
                episode.progress.end()
        return observed

    async def _begin(self, episode: _Episode, message: protocol.Reset) -> Step:
        episode.progress.change("building")
        prototype = await self._prototype(message.environment, message.options)
        prompt = values.decode(message.prompt)
        environment = await self._run(episode, prototype.for_episode)
        environment.prompt, environment.seed = prompt, message.seed
        if isinstance(environment, AsksModels):
            environment.ask = partial(self._ask, message.job)
        episode.environment = environment
        if isinstance(environment, Agent):
            return await self._work(episode, message.episode, environment, prompt, self._llm(message))
        given = await self._run(episode, environment.reset, prompt, message.seed)
        return _checked_step(given if isinstance(given, Step) else Step(messages=given), environment, "reset")

    async def _work(self, episode: _Episode, name: str, agent: Agent, task: Any, llm: LLM) -> Step:
        """Run an agent to its end."""
        loop = asyncio.get_running_loop()

        def begin() -> None:
            episode.working = True
            self._started(name)

        def run(*arguments: Any) -> Any:
            """A plain agent, in its thread."""
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(begin)
            return agent.run(*arguments)

        try:
            if cancellable(agent.run):
                begin()
                outcome = await self._run(episode, agent.run, task, llm)
            else:
                outcome = await self._run(episode, run, task, llm)
        finally:
            episode.working = False
            with suppress(Exception):  # the clients may be the user's own by now
                await self._calls(episode.threads, llm.aclose)
        if not isinstance(outcome, Outcome):
            raise TypeError(f"run returned {type(outcome).__name__}, not a rookery.Outcome")
        step = Step(reward=outcome.reward, done=True, metrics=outcome.metrics, rewards=outcome.rewards)
        return _checked_step(step, agent, "run")

    async def _advance(self, episode: _Episode, message: protocol.StepEpisode) -> Step:
        environment = episode.environment
        assert environment is not None  # the reset was answered without an error
        conversation = [{"role": turn.role, "content": turn.content} for turn in message.messages]
        reply = Reply(
            text=message.text,
            tokens=message.tokens,
            messages=conversation,
            turn=message.turn,
            raw=message.raw,
            special=message.special,
            logprobs=message.logprobs,
            finish=message.finish,
        )
        step = await self._run(episode, environment.step, reply)
        if not isinstance(step, Step):
            raise TypeError(f"step returned {type(step).__name__}, not a rookery.Step")
        return _checked_step(step, environment)

    async def _run(self, episode: _Episode, method: Callable[..., Any], *arguments: Any) -> Any:
        if episode.closed:
            raise asyncio.CancelledError
        return await self._calls(episode.threads, method, *arguments, progress=episode.progress)

    async def _finish(self, episode: _Episode, name: str) -> None:
        if episode.progress.cancellable:
            episode.turns[-1].cancel()
        async with episode.busy:  # a running plain method finishes first: calls never overlap
            if episode.environment is not None:
                try:
                    await self._calls(episode.threads, episode.environment.close)
                except Exception as error:  # user code raised; the episode is over
                    self.failures.report(f"closing episode {name}", episode.job, error)


class UserCodeExecutor:
    def __init__(self, threads_per_job: int = THREADS_PER_JOB) -> None:
        self._limit = threads_per_job
        self._threads: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: threading.Thread | None = None

    def thread_limit(self, job: str) -> asyncio.Semaphore:
        """The semaphore that limits the threads of ``job``; it lives as long as it is referenced."""
        semaphore = self._threads.get(job)
        if semaphore is None:
            semaphore = self._threads[job] = asyncio.Semaphore(self._limit)
        return semaphore

    async def __call__(
        self,
        threads: asyncio.Semaphore,
        method: Callable[..., Any],
        *arguments: Any,
        progress: CallProgress | None = None,
    ) -> Any:
        """The method's result, or its exception. Cancelling ends a method that is awaited, and one that waits for a
        thread; in a thread it runs to its end, so callers that must not overlap it do not cancel then: ``progress`` has
        the state."""
        progress = progress or CallProgress("", lambda call, queued: None)
        if cancellable(method):
            progress.change("awaiting")
            return await self._on_loop(method(*arguments))
        if threads.locked():
            progress.change("queued")
        async with threads:
            progress.change("running")
            result = await in_new_thread(_carrying, method, *arguments)
        if not inspect.isawaitable(result):
            return result
        progress.change("awaiting")
        return await self._on_loop(result)

    async def _on_loop(self, awaitable: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            try:
                return await awaitable
            except (SystemExit, KeyboardInterrupt) as error:  # these would end the loop for all methods
                raise _carried(error) from error

        if self._loop is None:
            self._loop = TenantLoop()
            self._runner = threading.Thread(target=self._loop.run_forever, daemon=True, name="environments")
            self._runner.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(wait(), self._loop))

    def close(self) -> None:
        if self._loop is None or self._runner is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._runner.join(JOIN_SECONDS)
        if not self._runner.is_alive():
            self._loop.close()


def cancellable(method: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(method)


def _carrying(method: Callable[..., Any], *arguments: Any) -> Any:
    """The method's result. Raises exceptions alone, which a future can carry."""
    try:
        return method(*arguments)
    except BaseException as error:
        raise _carried(error)  # noqa: B904  # the same error, or another one that says what it was


def _carried(error: BaseException) -> Exception:
    """``error`` as an exception that a future can carry: a user's ``exit()`` ends its call and not the process."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def describe_error(error: BaseException) -> str:
    """One line: the exception's type and text and, for an error in user code, its place."""
    if isinstance(error, UserError | values.ValueRefused | MessageRefused):
        return one_line(error)
    text = f"{type(error).__name__}: {one_line(error)}" if str(error) else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    entry = max((where + 1 for where, frame in enumerate(frames) if frame.filename == __file__), default=0)
    user_frames = [frame for frame in frames[entry:] if not frame.filename.startswith(_PACKAGE)]
    if user_frames:
        where = [frame for frame in user_frames if frame.filename == user_frames[0].filename][-1]
        text += f" ({where.filename}:{where.lineno} in {where.name})"
    return text


def one_line(error: BaseException) -> str:
    text = str(error)[:LONGEST_ERROR].encode("utf-8", "replace").decode()
    return " ".join(text.split()) or type(error).__name__


def _checked_step(step: Step, environment: Environment, method: str = "step") -> Step:
    """``step``, which ``method`` gave, with its values as they are sent. Raises :class:`TypeError` or
    :class:`ValueError` that names the value, the class of the environment and the place of its method."""

    def refusal(kind: type[Exception], name: str, value: object, expected: str) -> Exception:
        cls, code = type(environment), getattr(inspect.unwrap(getattr(environment, method)), "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno} in {code.co_name})" if code is not None else ""
        return kind(f"{cls.__name__}.{method} gave the {name} {_shown(value)}, expected {expected}{where}")

    def number(name: str, value: object, *, finite: bool) -> float:
        if not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):  # of any library, and no text
            raise refusal(TypeError, name, value, "a number")
        try:
            converted = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, ArithmeticError, RuntimeError):  # an array of several, an integer too large, …
            raise refusal(ValueError, name, value, "one number that a float can hold") from None
        if finite and not math.isfinite(converted):
            raise refusal(ValueError, name, value, "a finite number")
        return converted

    if not isinstance(step.metrics, Mapping):
        raise refusal(TypeError, "metrics", step.metrics, "a mapping of names to numbers")
    if (done := _truth(step.done)) is None:
        raise refusal(TypeError, "value of done", step.done, "True or False")
    reward = number("reward", step.reward, finite=True)
    metrics = {str(name): number(f"metric {name}", value, finite=False) for name, value in step.metrics.items()}
    values.check(list(metrics), "metrics")
    if not isinstance(step.rewards, Mapping):
        raise refusal(TypeError, "rewards", step.rewards, "a mapping of policies to numbers")
    if len(step.rewards) > protocol.MOST_POLICIES:
        raise refusal(ValueError, "rewards", step.rewards, f"at most {protocol.MOST_POLICIES} policies")
    rewards = {
        _policy_name(name, method): number(f"reward of {_shown(name)}", value, finite=True)
        for name, value in step.rewards.items()
    }
    if method == "reset":
        early = {"reward": reward, "value of done": done, "metrics": metrics, "rewards": rewards}
        for name in filter(early.get, early):
            raise refusal(ValueError, name, early[name], "none before the first reply, messages and the policy alone")
    messages, policy = _checked(step.messages, method, before_reply=not done), _policy_name(step.policy, method)
    if (tokens := _token_ids(step.tokens)) is None:
        raise refusal(TypeError, "tokens", step.tokens, "a list of token ids, whole numbers from 0")
    if tokens and messages:
        raise TypeError(f"{method} gave both messages and tokens, expected one of them")
    if method == "reset" and not (messages or tokens):
        raise TypeError(f"reset gave no messages, expected {MESSAGES}")
    return Step(messages, reward, done, metrics, policy, rewards, tokens)


def _truth(value: object) -> bool | None:
    """``value`` as a boolean; None where it is none, as a text or an array of several."""
    if value is None or not hasattr(type(value), "__bool__"):
        return None
    try:
        return bool(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        return None


def _token_ids(value: Any) -> list[int] | None:
    """``value`` as a list of token ids, of any type of integer; None where it is none."""
    if isinstance(value, str | bytes | Mapping):
        return None
    try:
        given = [*value]
        ids = [operator.index(token) for token in given]
    except (TypeError, ValueError, RuntimeError):
        return None
    fit = all(0 <= id < 1 << 31 for id in ids) and not any(isinstance(token, bool) for token in given)
    return ids if fit else None


def _policy_name(name: object, method: str) -> str:
    if not isinstance(name, str) or len(name) > LONGEST_POLICY:
        raise TypeError(f"{method} gave the policy {_shown(name)}, expected the name of a policy of the job")
    values.check(name, "policy")
    return name


def _shown(value: object) -> str:
    """A value and its type, in at most a line."""
    try:
        text = repr(value)
    except Exception:  # user code raised, or an integer has too many digits for a text
        text = "…"
    return f"{short(' '.join(text.split()))} ({type(value).__name__})"


def _checked(messages: Any, method: str, *, before_reply: bool = True) -> list[Message]:
    """The messages that ``method`` gave, as they are sent; with ``before_reply`` the policy replies to them."""
    if isinstance(messages, str | bytes | Mapping) or not hasattr(messages, "__iter__"):
        raise TypeError(f"{method} gave {type(messages).__name__} for messages, not {MESSAGES}")
    try:
        checked = conversation(list(messages), before_reply=before_reply)
        values.check(checked, "messages")
    except ValueError as error:
        raise type(error)(f"{method} gave messages that no policy can read: {error}") from None
    return checked
