"""Runs environments for a controller that it dials.

Promises:

* The connection may break and come back at any time: live episodes stay, and a call that is sent again is answered from
  memory, so no ``reset`` and no ``step`` ever happens twice in one environment.
* What an environment raises, or returns wrongly or too large, becomes that call's error and nothing else. A slow one
  delays nobody.
* Rewards are passed on as they are, not-a-number included: the controller decides what they are worth.

``python -m rookery.environments.host --connect URL``, with its key in ``ROOKERY_TOKEN``, is the process that hosts the
built-in environments. With ``--die-with-parent`` it ends when its standard input ends, which is when the parent process
is gone. SIGTERM and Ctrl-C end it too. It exits with 0 in these cases and with 1 when the service refuses it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
import uuid
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec

from rookery import protocol
from rookery.aio import cancel_all, on_end_signals, prefer_event_loop
from rookery.children import die_with_parent
from rookery.environments.agent import LLM, Agent
from rookery.environments.base import Environment
from rookery.environments.best_constants import constants_by_policy
from rookery.environments.builtins import BUILTINS, Builtin
from rookery.environments.checks import EnvironmentChecks
from rookery.environments.episodes import CallProgress, Episodes, UserCodeExecutor, describe_error
from rookery.environments.judges import answer_of, named_judge
from rookery.environments.models import ModelAnswer, ModelQuestion
from rookery.environments.outbound import reachable_hosts
from rookery.environments.prototypes import Prototypes
from rookery.environments.rules import EnvironmentRules
from rookery.environments.sandbox.sandbox import isolation
from rookery.errors import EXIT_REFUSED, UserError, short, to_stderr
from rookery.protocol.connection import Channel, ConnectionClosed, RegistrationRefused, ServiceEndpoint, stay_connected
from rookery.protocol.envhost import MOST_EPISODES
from rookery.settings import HOST_SETTINGS, Settings, token_of
from rookery.spec import values
from rookery.spec.job import BUILTIN
from rookery.telemetry.log import log_to_stderr
from rookery.tenant_loop import TenantLoop
from rookery.turns import TENANT

log = logging.getLogger("rookery.environments")

PING_SECONDS, PING_TIMEOUT = 5.0, 10.0
"""A silent service is noticed within their sum, well within jobs' return_timeout."""

Sent = protocol.Prompts | protocol.Observation | protocol.AgentStarted | protocol.CallQueued | protocol.AskModel
"""Messages to the controller."""

Hosted = Environment | type[Environment] | Builtin
"""An object (episodes are copies of it), a class (built from the job's options), or a built-in."""


class Host:
    """One environment host: one connection at a time, any number of episodes."""

    def __init__(
        self,
        url: str,
        token: str,
        environments: Mapping[str, Hosted],
        instance: str | None = None,
        ca_file: str = "",
        rules: EnvironmentRules | None = None,
    ) -> None:
        """``url`` is the service's (http or https), ``token`` a key of the tenant, or of a worker for the service's own
        host; ``instance`` names this process: one that reconnects under the same name still has its episodes.
        ``ca_file`` is as in :func:`~rookery.network.client_tls`; ``rules`` are the service's, of its own host."""
        self._url, self._token, self._ca_file = url, token, ca_file
        self._address = url.partition(",")[0]
        """Of the service or its standbys, the one that was reached last."""
        self._offers = dict(environments)
        self._instance = instance or f"host-{uuid.uuid4().hex}"
        self._prototypes = Prototypes(self._build, lambda name: isinstance(self._offers.get(name), Builtin))
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel: Channel[protocol.ToHost] | None = None
        self._calls = UserCodeExecutor()
        self._episodes = Episodes(self._calls, self._environment, self._ask, self._llm, self._started, self._queued)
        self._questions: dict[str, asyncio.Future[protocol.ModelReply | None]] = {}
        """Unanswered questions. The result None means that the connection ended."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._checks = EnvironmentChecks(rules or EnvironmentRules(isolation(), reachable_hosts()))
        self.connected = asyncio.Event()
        """Set while the controller has welcomed this host."""

    async def run(self) -> None:
        """Serve until cancelled. Raises :class:`UserError` when the service refuses this host."""
        self._loop = asyncio.get_running_loop()
        try:
            await stay_connected(
                ServiceEndpoint(self._url, "/wire/host", self._token, self._ca_file),
                protocol.to_host,
                hello=self._hello,
                converse=self._converse,
                ping_seconds=PING_SECONDS,
                ping_timeout=PING_TIMEOUT,
            )
        except RegistrationRefused as refusal:
            raise UserError(f"the service refuses this environment host: {refusal}") from None
        finally:
            await self._end()

    # --- the connection -----------------------------------------------------------------------------------------------

    def _hello(self) -> protocol.HostHello:
        offers = [
            protocol.HostedEnvironment(name=name, deterministic=made.deterministic, agent=_is_agent(made))
            for name, offer in self._offers.items()
            for made in [offer.environment if isinstance(offer, Builtin) else offer]
        ]
        return protocol.HostHello(
            protocol=protocol.PROTOCOL,
            instance=self._instance,
            environments=offers,
            episodes=self._episodes.ids()[:MOST_EPISODES],
        )

    async def _converse(self, channel: Channel[protocol.ToHost]) -> None:
        self._channel, self._address = channel, channel.base
        self.connected.set()
        try:
            await channel.run(self._handle, lambda: protocol.HostHeartbeat(active=len(self._episodes.ids())))
        finally:
            self._channel = None
            self.connected.clear()
            for question in self._questions.values():
                if not question.done():
                    question.set_result(None)

    def _handle(self, message: protocol.ToHost) -> None:
        match message:
            case protocol.GetPrompts():
                self._spawn(self._prompts(message))
            case protocol.Reset():
                self._observe(message, self._episodes.reset)
            case protocol.StepEpisode():
                self._observe(message, self._episodes.step)
            case protocol.CloseEpisode():
                self._episodes.close(message.episode)
            case protocol.ModelReply():
                question = self._questions.get(message.call)
                if question is not None and not question.done():
                    question.set_result(message)

    async def _send(self, message: Sent) -> None:
        if (channel := self._channel) is None:
            return  # the controller asks again after the reconnect
        message.epoch = channel.epoch  # it is a part of the size
        assert isinstance(channel.welcome, protocol.HostWelcome)
        frame, most = protocol.encode(message), channel.welcome.max_bytes or protocol.MAX_FRAME
        if problem := _problem(frame, most):  # it would end the connection, and be asked for again, without end
            if isinstance(message, protocol.AskModel):
                raise UserError(f"the question to {short(message.model)}: {problem}")
            assert not isinstance(message, protocol.AgentStarted | protocol.CallQueued)
            message = _refused(message, problem)
        with contextlib.suppress(ConnectionClosed):  # the receiving task sees it too and reconnects
            await channel.send(message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- questions to models ------------------------------------------------------------------------------------------

    def _ask(self, job: str, question: ModelQuestion) -> ModelAnswer:
        """As :data:`~rookery.environments.models.Ask`, for an episode of ``job``."""
        judge = named_judge(question.model)
        if judge is not None:
            return answer_of(judge, question)
        if self._loop is None:
            raise UserError(f"{short(question.model)}: this host is not connected")
        return asyncio.run_coroutine_threadsafe(self._ask_service(job, question), self._loop).result()

    async def _ask_service(self, job: str, question: ModelQuestion) -> ModelAnswer:
        messages = [protocol.ChatMessage(role=one["role"], content=one["content"]) for one in question.messages]
        asked = protocol.AskModel(
            call=uuid.uuid4().hex, job=job, model=question.model, messages=messages, schema=question.schema,
            max_tokens=question.max_tokens, temperature=question.temperature, top_p=question.top_p, seed=question.seed,
        )  # fmt: skip
        reply = None
        try:
            while reply is None:  # asked again after a reconnection
                await self.connected.wait()
                future = self._questions[asked.call] = asyncio.get_running_loop().create_future()
                await self._send(asked)
                reply = await future
        finally:
            self._questions.pop(asked.call, None)
        if reply.error:
            raise UserError(reply.error)
        return ModelAnswer(reply.text, reply.prompt_tokens, reply.tokens)

    # --- prompts ------------------------------------------------------------------------------------------------------

    async def _prompts(self, message: protocol.GetPrompts) -> None:
        TENANT.set(message.tenant)
        answer = protocol.Prompts(call=message.call)
        try:
            prototype = await self._prototypes.get(message.environment, message.options)
            environment, threads = prototype.environment, self._calls.thread_limit(message.job)
            if message.constant and type(environment).best_constant is Environment.best_constant:
                await self._send(answer)  # it knows none: its prompts are not read again
                return
            progress = CallProgress(message.call, self._queued)
            prompts, answer.size, note = await self._calls(threads, prototype.take, message, progress=progress)
            if message.constant:
                given = [values.decode(prompt) for prompt in prompts]
                found = await self._calls(threads, environment.best_constant, given)
                answer.constants = constants_by_policy(found)
            else:
                answer.prompts, answer.note = prompts, note
        except Exception as error:  # a user's code ran
            failed = "best_constant" if message.constant else "prompts"
            self._episodes.failures.report(f"{failed} of {message.environment}", message.job, error)
            answer.error = describe_error(error)
        await self._send(answer)

    async def _environment(self, name: str, options: dict[str, Any]) -> Environment:
        return (await self._prototypes.get(name, options)).environment

    def _llm(self, reset: protocol.Reset) -> LLM:
        """The model of an agent's episode."""
        base_url = f"{self._address.rstrip('/')}/agents/{quote(reset.episode, safe='')}/v1"
        return LLM(base_url, reset.agent_key, reset.policies, self._ca_file)

    def _started(self, episode: str) -> None:
        """The agent of an episode runs."""
        self._spawn(self._send(protocol.AgentStarted(episode=episode)))

    def _queued(self, call: str, queued: bool) -> None:
        """The method of a call waits for a thread, or begins."""
        self._spawn(self._send(protocol.CallQueued(call=call, queued=queued)))

    async def _build(self, name: str, options: dict[str, Any]) -> Environment:
        offer = self._offers.get(name)
        if offer is None:
            raise UserError(f"this host has no environment {name!r}; it has {', '.join(self._offers)}")
        if isinstance(offer, Environment) and options:
            raise UserError(f"environment {name!r} is an object and takes no options; given {', '.join(options)}")
        if isinstance(offer, Environment):
            return offer
        build: Callable[[], Environment] = (
            (lambda: offer.built_in_host(options, self._checks))
            if isinstance(offer, Builtin)
            else (lambda: offer(**options))
        )
        return await self._calls(self._calls.thread_limit(f"build {name} for {TENANT.get()}"), build)

    def _observe(
        self,
        message: protocol.Reset | protocol.StepEpisode,
        turn_of: Callable[[Any], asyncio.Task[protocol.Observation]],
    ) -> None:
        try:
            turn = turn_of(message)  # here, so that calls take effect in the order in which they came
        except UserError as error:
            refusal = protocol.Observation(call=message.call, episode=message.episode, error=str(error))
            self._spawn(self._send(refusal))
        else:
            self._spawn(self._answer(message.call, turn))

    async def _answer(self, call: str, turn: asyncio.Task[protocol.Observation]) -> None:
        await asyncio.wait([turn])
        if not turn.cancelled():  # else the episode was closed meanwhile
            await self._send(msgspec.structs.replace(turn.result(), call=call))

    async def _end(self) -> None:
        await self._episodes.close_all()
        await cancel_all(*self._tasks)
        await self._prototypes.close()
        self._calls.close()
        self._checks.close()


def _is_agent(environment: Environment | type[Environment]) -> bool:
    return issubclass(environment if isinstance(environment, type) else type(environment), Agent)


def _problem(frame: bytes, most: int) -> str:
    """Why the service would refuse an answer; empty if it would not."""
    if len(frame) > most:
        return (
            f"the answer has {len(frame)} bytes, at most {most >> 20} MB can be sent; make prompts and messages shorter"
        )
    try:
        protocol.decode(protocol.from_host, frame)
    except protocol.BadFrame as error:
        return f"the answer is out of bounds: {error}"
    return ""


def _refused(message: protocol.Prompts | protocol.Observation, error: str) -> protocol.Prompts | protocol.Observation:
    """An error in the place of an answer."""
    if isinstance(message, protocol.Prompts):
        return protocol.Prompts(call=message.call, error=error)
    return protocol.Observation(call=message.call, episode=message.episode, error=error)


async def serve(url: str, settings: Settings, *, end_with_parent: bool) -> None:
    """Hosts the built-ins until a signal ends it. Raises :class:`UserError` when the service refuses."""
    prefer_event_loop()  # a tenant's verifiers may keep a hundred threads busy
    rules = EnvironmentRules.of(settings.server)
    rules.apply()
    builtins = {f"{BUILTIN}{id}": builtin for id, builtin in BUILTINS.items()}
    host = Host(url, token_of(), builtins, ca_file=settings.trusted, rules=rules)
    running = asyncio.create_task(host.run())
    loop = asyncio.get_running_loop()
    on_end_signals(running.cancel)
    if end_with_parent:
        die_with_parent(partial(_end, loop, running))
    with contextlib.suppress(asyncio.CancelledError):
        await running


def _end(loop: asyncio.AbstractEventLoop, running: asyncio.Task[None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
        loop.call_soon_threadsafe(running.cancel)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rookery.environments.host", description="Host built-ins.")
    parser.add_argument("--connect", required=True, metavar="URL", help="the service's address")
    parser.add_argument("--die-with-parent", action="store_true", help="end when standard input ends")
    arguments = parser.parse_args()
    try:
        settings = Settings.load(uses=HOST_SETTINGS)
        log_to_stderr(settings.server.log_level)
        with asyncio.Runner(loop_factory=TenantLoop) as runner:
            runner.run(serve(arguments.connect, settings, end_with_parent=arguments.die_with_parent))
    except UserError as error:
        to_stderr(error)
        sys.exit(EXIT_REFUSED)


if __name__ == "__main__":
    main()
