"""The environment host against a real WebSocket server that plays the controller."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from fractions import Fraction
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support import faulty
from tests.support.peers import PATIENCE, settle
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from rookery import BestConstant, protocol
from rookery.aio import cancel_all
from rookery.environments.agent import LLM, Agent
from rookery.environments.base import Environment, Reply, Split, Step
from rookery.environments.builtins import BUILTINS
from rookery.environments.episodes import Episodes, UserCodeExecutor
from rookery.environments.host import Host, Hosted
from rookery.environments.models import ModelAnswer, ModelQuestion
from rookery.errors import EXIT_REFUSED, UserError
from rookery.turns import TENANT


class Controller:
    """The other end: accepts one host at a time, sends calls, gathers answers by call."""

    def __init__(self) -> None:
        self.hellos: list[protocol.HostHello] = []
        self.beats: list[protocol.HostHeartbeat] = []
        self.refusal = ""
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._link: ServerConnection | None = None
        self._joined = asyncio.Condition()
        self._numbers = itertools.count()
        self.server: Server

    async def handle(self, link: ServerConnection) -> None:
        assert link.request is not None and link.request.path == "/wire/host"
        self.authorization = link.request.headers["authorization"]
        hello = protocol.decode(protocol.from_host, await link.recv(decode=False))
        assert isinstance(hello, protocol.HostHello)
        if self.refusal:
            await link.send(protocol.encode(protocol.HelloRejected(reason=self.refusal)))
            return
        epoch = len(self.hellos) + 1
        await link.send(protocol.encode(protocol.HostWelcome(epoch=epoch, heartbeat_seconds=0.05)))
        async with self._joined:
            self.hellos.append(hello)
            self._link = link
            self._joined.notify_all()
        async for frame in link:
            message = protocol.decode(protocol.from_host, frame if isinstance(frame, bytes) else frame.encode())
            assert message.epoch == epoch  # type: ignore[union-attr]
            if isinstance(message, protocol.HostHeartbeat):
                async with self._joined:
                    self.beats.append(message)
                    self._joined.notify_all()
            elif isinstance(message, protocol.Prompts | protocol.Observation):
                self._answers[message.call].set_result(message)

    async def joined(self, times: int = 1) -> protocol.HostHello:
        async with self._joined:
            await self._joined.wait_for(lambda: len(self.hellos) >= times)
        return self.hellos[times - 1]

    async def beaten(self, times: int) -> None:
        async with self._joined:
            await self._joined.wait_for(lambda: len(self.beats) >= times)

    async def drop(self) -> None:
        """Break the connection as a network does."""
        assert self._link is not None
        self._link.transport.abort()
        await self._link.wait_closed()

    async def send(self, message: protocol.Message) -> None:
        assert self._link is not None
        await self._link.send(protocol.encode(message))

    async def begin(self, message: Any) -> asyncio.Future[Any]:
        message.call = f"call-{next(self._numbers)}"
        future = self._answers[message.call] = asyncio.get_running_loop().create_future()
        await self.send(message)
        return future

    async def ask(self, message: Any) -> Any:
        return await asyncio.wait_for(await self.begin(message), PATIENCE)


def reset(episode: str, environment: str = "env", number: int = 3, **options: Any) -> protocol.Reset:
    prompt = json.dumps({"number": number}).encode()
    return protocol.Reset(
        call="", episode=episode, job="job", environment=environment, options=options, prompt=prompt, seed=7
    )


def step(episode: str, turn: int = 0, text: str = "3") -> protocol.StepEpisode:
    turns = [protocol.ChatMessage(role="user", content="Say 3."), protocol.ChatMessage(role="assistant", content=text)]
    tokens = list(text.encode())
    return protocol.StepEpisode(call="", episode=episode, turn=turn, text=text, tokens=tokens, messages=turns)


def prompts(environment: str = "env", start: int = 0, count: int = 3, **options: Any) -> protocol.GetPrompts:
    return protocol.GetPrompts(
        call="",
        job="job",
        environment=environment,
        options=options,
        split="train",
        start=start,
        count=count,
        seed=0,
        shuffle=False,
    )


@contextlib.asynccontextmanager
async def hosting(first: str = "", /, **environments: Hosted) -> AsyncIterator[Controller]:
    """``first``: addresses that the host tries before."""
    controller = Controller()
    async with serve(controller.handle, "127.0.0.1", 0) as controller.server:
        port = controller.server.sockets[0].getsockname()[1]
        host = Host(f"{first}http://127.0.0.1:{port}", "tml-key", environments, instance="me")
        running = asyncio.create_task(host.run())
        try:
            await asyncio.wait_for(controller.joined(), PATIENCE)
            yield controller
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def test_an_episode_from_hello_to_reward() -> None:
    async with hosting(env=faulty.Good(), slow=faulty.SlowAsync) as controller:
        hello = controller.hellos[0]
        assert controller.authorization == "Bearer tml-key"
        assert (hello.instance, hello.protocol) == ("me", protocol.PROTOCOL)
        assert {(offer.name, offer.deterministic) for offer in hello.environments} == {("env", True), ("slow", True)}
        listed = await controller.ask(prompts(start=6))
        assert ([json.loads(prompt)["number"] for prompt in listed.prompts], listed.size) == ([6, 7, 0], 8)
        first = await controller.ask(reset("e1"))
        assert (first.messages, first.error) == ([protocol.ChatMessage(role="user", content="Say 3.")], "")
        right = await controller.ask(step("e1"))
        assert (right.reward, right.done, right.error) == (1, True, "")
        await controller.ask(reset("e2"))
        assert (await controller.ask(step("e2", text="4"))).reward == 0
        await controller.ask(reset("e3", "slow", seconds=0.01, prompts=2))
        assert (await controller.ask(step("e3"))).reward == 1
        assert controller.beats


class SaysAddress(Agent):
    def prompts(self, split: Split) -> list[Any]:
        return [1]

    async def run(self, task: Any, llm: LLM) -> Any:
        raise ValueError(llm.base_url)


async def test_an_agent_gets_the_address_that_its_host_has_reached() -> None:
    async with hosting("http://127.0.0.1:1,", env=SaysAddress) as controller:
        port = controller.server.sockets[0].getsockname()[1]
        assert f"ValueError: http://127.0.0.1:{port}/agents/e1/v1" in (await controller.ask(reset("e1"))).error


class SaysTenant(Environment):
    """Its messages name the tenant whose call each method serves."""

    def __init__(self) -> None:
        self.built_for = TENANT.get()

    def prompts(self, split: str) -> list[str]:
        return [self.built_for, TENANT.get()]

    async def reset(self, prompt: Any, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{self.built_for} {TENANT.get()}"}]

    def step(self, reply: Reply) -> Step:
        return Step(messages=[{"role": "user", "content": f"{self.built_for} {TENANT.get()}"}])


class SaysTenantInThread(SaysTenant):
    def reset(self, prompt: Any, seed: int) -> list[dict[str, str]]:  # type: ignore[override]
        return [{"role": "user", "content": f"{self.built_for} {TENANT.get()}"}]


async def test_each_method_knows_the_tenant_that_calls() -> None:
    async with hosting(env=SaysTenant, thread=SaysTenantInThread) as controller:
        for name in ("env", "thread"):
            asked = prompts(name, count=2)
            asked.tenant = "alice"
            assert [json.loads(one) for one in (await controller.ask(asked)).prompts] == ["alice", "alice"]
            for tenant in ("bob", "alice"):
                begun = reset(f"{name}-{tenant}", name)
                begun.tenant = tenant
                assert (await controller.ask(begun)).messages[0].content == f"{tenant} {tenant}"
                assert (await controller.ask(step(begun.episode))).messages[0].content == f"{tenant} {tenant}"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (faulty.RaisesInReset(), r"RuntimeError: no beginning \(.*faulty\.py:[0-9]+ in reset\)$"),
        (faulty.RaisesInStep(), r"RuntimeError: no step \(.*faulty\.py:[0-9]+ in step\)$"),
        (faulty.Exits(), r"RuntimeError: SystemExit: 3"),
        (faulty.ExitsAsync(), r"RuntimeError: SystemExit: 3"),
        (faulty.WrongAnswers("text"), "TypeError: reset gave str"),
        (faulty.WrongAnswers("none"), "TypeError: reset gave NoneType"),
        (faulty.WrongAnswers("messages"), "reset gave messages that no policy can read: messages.0 is {"),
        (faulty.WrongAnswers("empty"), "TypeError: reset gave no messages"),
        (
            faulty.WrongAnswers("reward"),
            r"TypeError: WrongAnswers\.step gave the reward 'much' \(str\), expected a number",
        ),
        (faulty.WrongAnswers("step"), "TypeError: step returned float, not a rookery.Step"),
        (
            faulty.WrongAnswers("surrogate"),
            r"step gave messages .*: messages\.0\.content: given .*, allowed: whole characters",
        ),
    ],
)
async def test_an_exception_in_an_environment_is_the_error_of_its_call(environment: Hosted, says: str) -> None:
    async with hosting(env=environment, good=faulty.Good(), later=faulty.SlowAsync(0.0)) as controller:
        answer = await controller.ask(reset("e1"))
        if not answer.error:
            answer = await controller.ask(step("e1"))
        assert re.match(says, answer.error), answer.error
        assert "\n" not in answer.error
        after = await controller.ask(step("e1", turn=1))
        assert "after the episode's end" in after.error or "not alive" in after.error or "is at turn" in after.error
        for name in ("good", "later"):  # others notice nothing
            await controller.ask(reset(name, name))
            assert (await controller.ask(step(name))).reward == 1


async def test_an_answer_too_large_for_a_frame_is_its_calls_error() -> None:
    """Nobody loses the link by it, and it is not asked for again."""

    class Long(faulty.Good):
        def prompts(self, split: Any) -> Any:
            return ["x" * protocol.MAX_FRAME]

        def reset(self, prompt: Any, seed: int) -> Any:
            return [{"role": "user", "content": "x" * protocol.MAX_FRAME}]

    async with hosting(env=Long(), good=faulty.Good()) as controller:
        for message in (prompts(count=1), reset("e1")):
            answer = await controller.ask(message)
            assert re.match(r"the answer has 671[0-9]{5} bytes, at most 64 MB can be sent", answer.error)
        await controller.ask(reset("e2", "good"))
        assert (await controller.ask(step("e2"))).reward == 1
        assert len(controller.hellos) == 1


@pytest.mark.parametrize("wrong", ["role", "messages", "metrics", "metric"])
async def test_an_answer_out_of_bounds_is_its_calls_error(wrong: str) -> None:
    class Odd(faulty.Good):
        def reset(self, prompt: Any, seed: int) -> Any:
            roles = {"role": ["r" * 7_000_000], "messages": ["user"] * 257}.get(wrong, ["user"])
            return [{"role": role, "content": "x"} for role in roles]

        def step(self, reply: Any) -> Any:
            names = {"metrics": [f"m{n}" for n in range(101)], "metric": ["m" * 201]}[wrong]
            return Step(done=True, metrics=dict.fromkeys(names, 1.0))

    async with hosting(env=Odd(), good=faulty.Good()) as controller:
        answer = await controller.ask(reset("e1"))
        if wrong in ("metrics", "metric"):
            answer = await controller.ask(step("e1"))
        says = "reset gave messages" if wrong == "role" else "the answer is out of bounds: Expected"
        assert answer.error.startswith(says) and len(answer.error) < 200
        await controller.ask(reset("e2", "good"))
        assert len(controller.hellos) == 1


class Gives(faulty.Good):
    """Its steps have the given fields, and by default end the episode."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = given

    def step(self, reply: Any) -> Any:
        return Step(**{"done": True, **self.given})


class Unshown:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


PLACE = r" \(.*test_host\.py:[0-9]+ in step\)$"
HUGE = 10**400


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"reward": None}, r"TypeError: Gives\.step gave the reward None \(NoneType\), expected a number"),
        ({"reward": "1.0"}, r"TypeError: Gives\.step gave the reward '1\.0' \(str\), expected a number"),
        ({"reward": b"1"}, r"TypeError: .* the reward b'1' \(bytes\), expected a number"),
        ({"reward": [1.0]}, r"TypeError: .* the reward \[1\.0\] \(list\), expected a number"),
        ({"reward": {"score": 1}}, r"TypeError: .* the reward .*\(dict\), expected a number"),
        ({"reward": 1j}, r"TypeError: .* the reward 1j \(complex\), expected a number"),
        ({"reward": math.nan}, r"ValueError: .* the reward nan \(float\), expected a finite number"),
        ({"reward": -math.inf}, r"ValueError: .* the reward -inf \(float\), expected a finite number"),
        ({"reward": np.float32("inf")}, r"ValueError: .* \(float32\), expected a finite number"),
        ({"reward": Decimal("NaN")}, r"ValueError: .* \(Decimal\), expected a finite number"),
        ({"reward": Decimal("sNaN")}, r"ValueError: .* \(Decimal\), expected one number that a float can hold"),
        ({"reward": Decimal("1e400")}, r"ValueError: .* \(Decimal\), expected a finite number"),
        ({"reward": HUGE}, r"ValueError: .* the reward 1000*\.\.\. \(int\), expected one number that a float can hold"),
        ({"reward": np.array([1.0, 2.0])}, r"ValueError: .* \(ndarray\), expected one number"),
        ({"reward": Unshown()}, r"TypeError: .* the reward … \(Unshown\), expected a number"),
        ({"metrics": {"right": None}}, r"TypeError: .* the metric right None \(NoneType\), expected a number"),
        ({"metrics": {"right": "yes"}}, r"TypeError: .* the metric right 'yes' \(str\), expected a number"),
        ({"metrics": {"right": HUGE}}, r"ValueError: .* the metric right 1000*\.\.\. \(int\), expected one number"),
        ({"metrics": None}, r"TypeError: .* the metrics None \(NoneType\), expected a mapping"),
        ({"metrics": [("right", 1.0)]}, r"TypeError: .* the metrics .* \(list\), expected a mapping"),
        ({"done": "false"}, r"TypeError: .* the value of done 'false' \(str\), expected True or False"),
        ({"done": np.array([True, False])}, r"TypeError: .* the value of done .* \(ndarray\), expected True or False"),
        ({"tokens": None}, r"TypeError: .* the tokens None \(NoneType\), expected a list of token ids"),
        ({"tokens": "12"}, r"TypeError: .* the tokens '12' \(str\), expected a list of token ids"),
        ({"tokens": [1, 2.0]}, r"TypeError: .* the tokens \[1, 2\.0\] \(list\), expected a list of token ids"),
        ({"tokens": [1, True]}, r"TypeError: .* the tokens \[1, True\] \(list\), expected a list of token ids"),
        ({"tokens": [-1]}, r"TypeError: .* the tokens \[-1\] \(list\), expected a list of token ids"),
        ({"tokens": [2**31]}, r"TypeError: .* the tokens \[2147483648\] \(list\), expected a list of token ids"),
        ({"done": None}, r"TypeError: .* the value of done None \(NoneType\), expected True or False"),
    ],
)
async def test_a_value_that_is_no_number_is_named_with_its_class_and_place(given: dict[str, Any], says: str) -> None:
    async with hosting(env=Gives(given)) as controller:
        await controller.ask(reset("e1"))
        answer = await controller.ask(step("e1"))
        assert re.match(says + ".*" + PLACE, answer.error), answer.error


class Begins(faulty.Good):
    """Its reset returns a step with the given fields."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = given

    def reset(self, prompt: Any, seed: int) -> Any:
        return Step(**{"messages": [{"role": "user", "content": "Go."}], **self.given})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"reward": 5.0}, r"ValueError: Begins\.reset gave the reward 5\.0 \(float\), expected none before the first"),
        ({"rewards": {"a": 2.0}}, r"ValueError: .* the rewards .*'a': 2\.0.*, expected none"),
        ({"metrics": {"m": 0.0}}, r"ValueError: .* the metrics .*'m': 0\.0.*, expected none"),
        ({"done": True}, r"ValueError: .* the value of done True \(bool\), expected none"),
        ({"reward": "x"}, r"TypeError: .* the reward 'x' \(str\), expected a number"),
        ({"metrics": None}, r"TypeError: .* the metrics None"),
    ],
)
async def test_a_step_of_reset_has_messages_and_a_policy_alone(given: dict[str, Any], says: str) -> None:
    async with hosting(bad=Begins(given), good=Begins({"policy": "b", "reward": np.float32(0), "done": False})) as host:
        answer = await host.ask(reset("e1", "bad"))
        assert re.match(says + r".*test_host\.py:[0-9]+ in reset\)$", answer.error), answer.error
        answer = await host.ask(reset("e2", "good"))
        assert (answer.policy, answer.error, answer.messages[0].content) == ("b", "", "Go.")


async def test_numbers_of_any_type_are_taken() -> None:
    given = {
        "reward": np.float32(0.5),
        "done": np.bool_(True),
        "metrics": {
            "flag": True, "whole": np.int64(3), "exact": Decimal("0.25"), "part": Fraction(1, 4), "zero": np.array(2.0),
            "absent": math.nan, "large": 2**63,
        },
        "tokens": np.array([3, 2**31 - 1]),
    }  # fmt: skip
    async with hosting(env=Gives(given)) as controller:
        await controller.ask(reset("e1"))
        answer = await controller.ask(step("e1"))
        assert (answer.error, answer.reward, answer.done) == ("", 0.5, True)
        assert answer.tokens == [3, 2**31 - 1]
        assert math.isnan(answer.metrics.pop("absent"))
        assert answer.metrics == {"flag": 1, "whole": 3, "exact": 0.25, "part": 0.25, "zero": 2, "large": 2.0**63}


async def test_wrong_calls_and_prompts_are_answered_with_an_error() -> None:
    async with hosting(env=faulty.Good(), bad=faulty.RaisesInPrompts, jsonl=BUILTINS["jsonl"]) as controller:
        assert "no environment 'other'; it has env, bad, jsonl" in (await controller.ask(prompts("other"))).error
        assert "no environment 'other'" in (await controller.ask(reset("e0", "other"))).error
        assert "takes no options; given x" in (await controller.ask(reset("e1", x=1))).error
        assert "unexpected keyword argument 'x'" in (await controller.ask(prompts("bad", x=1))).error
        assert "RuntimeError: no prompts" in (await controller.ask(prompts("bad"))).error
        assert "environment.verifier: missing" in (await controller.ask(prompts("jsonl", rows=[]))).error
        assert "not alive" in (await controller.ask(step("never"))).error
        await controller.ask(reset("e2"))
        assert "is at turn 0" in (await controller.ask(step("e2", turn=1))).error
        await controller.ask(step("e2"))
        assert "after the episode's end" in (await controller.ask(step("e2", turn=1))).error


async def test_the_first_held_out_prompts_come_with_the_number_that_is_trained_on() -> None:
    async with hosting(env=faulty.Good(4), jsonl=BUILTINS["jsonl"]) as controller:
        first = await controller.ask(msgspec.structs.replace(prompts(count=2), split="eval"))
        assert first.note.startswith("4 of 4 held-out prompts are training prompts too")
        later = await controller.ask(msgspec.structs.replace(prompts(start=2, count=2), split="eval"))
        assert not later.note and not (await controller.ask(prompts())).note


class Known(faulty.Good):
    """Its best constant is the number of the prompts that it gets."""

    reads = 0

    def prompts(self, split: Any) -> Any:
        Known.reads += 1
        return super().prompts(split)


class Knows(Known):
    def best_constant(self, prompts: Any) -> Any:
        return {"a": BestConstant(reply=json.dumps(prompts[0]), reward=0.5, prompts=len(prompts))}


class Unsure(faulty.Good):
    def best_constant(self, prompts: Any) -> Any:
        return prompts[0]


async def test_the_best_constants_of_some_prompts_come_without_them() -> None:
    """An environment that knows none is not asked for its prompts again."""
    asked = msgspec.structs.replace(prompts(count=2), constant=True)
    async with hosting(env=Known(4), knows=Knows(4), unsure=Unsure(4)) as controller:
        reads = Known.reads
        none = await controller.ask(msgspec.structs.replace(asked))
        assert (none.constants, none.prompts, none.error) == ({}, [], "") and Known.reads == reads
        found = await controller.ask(msgspec.structs.replace(asked, environment="knows"))
        [constant] = found.constants.values()
        assert found.constants == {"a": constant} and not found.prompts
        assert (constant.reward, constant.prompts) == (0.5, 2)
        wrong = await controller.ask(msgspec.structs.replace(asked, environment="unsure"))
        assert "best_constant gave" in wrong.error and wrong.constants == {}


async def test_a_call_sent_again_is_answered_from_memory_and_nothing_happens_twice() -> None:
    counting = faulty.Counting()
    async with hosting(env=counting) as controller:
        await controller.ask(reset("e1"))
        first = await controller.ask(step("e1", 0, "a"))
        await controller.ask(step("e1", 1, "b"))
        # A controller that was restarted tells the episode from its beginning.
        assert (await controller.ask(reset("e1"))).messages[0].content == "Say 3."
        again = await controller.ask(step("e1", 0, "a"))
        assert (again.messages, counting.answered) == (first.messages, ["a", "b"])
        assert "another reply" in (await controller.ask(step("e1", 1, "c"))).error
        assert (await controller.ask(step("e1", 2, "c"))).done
        assert counting.answered == ["a", "b", "c"]


async def test_episodes_outlive_a_broken_link() -> None:
    stuck = faulty.Stuck()
    async with hosting(env=faulty.Counting(), stuck=stuck) as controller:
        await controller.ask(reset("e1"))
        await controller.ask(step("e1", 0, "a"))
        await controller.ask(reset("e2", "stuck"))
        await controller.begin(step("e2"))
        await asyncio.to_thread(stuck.entered.acquire)
        await controller.drop()
        hello = await asyncio.wait_for(controller.joined(2), PATIENCE)
        assert (hello.instance, set(hello.episodes)) == ("me", {"e1", "e2"})
        # The step that ran meanwhile is asked for again, and happens once.
        waiting = await controller.begin(step("e2"))
        stuck.release.set()
        assert (await asyncio.wait_for(waiting, PATIENCE)).reward == 1
        assert not stuck.entered.acquire(blocking=False)
        assert (await controller.ask(step("e1", 1, "b"))).messages[0].content == "Step 2."


def asks_nobody(job: str, question: ModelQuestion) -> ModelAnswer:
    raise AssertionError


async def test_no_episode_is_closed_for_the_sake_of_others() -> None:
    """However many there are, and however long it has been idle."""

    async def prototype(name: str, options: dict[str, Any]) -> Environment:
        await asyncio.Event().wait()
        raise AssertionError

    calls = UserCodeExecutor()
    episodes = Episodes(calls, prototype, asks_nobody, lambda reset: LLM("", "", []), asks_nobody, asks_nobody)
    names = [f"e{number}" for number in range(10_001)]
    turns = [episodes.reset(reset(name)) for name in names]
    await settle(1)
    assert set(episodes.ids()) == set(names)
    assert episodes.reset(reset("e0")) is turns[0]
    await cancel_all(*turns)


async def test_stuck_environments_delay_no_other_environment() -> None:
    """Eighty that never return, more than the job's threads; another job, async ones and beats go on."""
    stuck = faulty.Stuck()
    async with hosting(stuck=stuck, good=faulty.Good(), later=faulty.SlowAsync(seconds=0.01)) as controller:
        for number in range(80):
            message = reset(f"s{number}", "stuck")
            message.job = "stuck job"
            await controller.ask(message)
        waiting = [await controller.begin(step(f"s{number}")) for number in range(80)]
        for name in ("good", "later"):
            await controller.ask(reset(name, name))
            assert (await controller.ask(step(name))).reward == 1
        assert not any(future.done() for future in waiting)
        await controller.send(protocol.CloseEpisode(episode="s0"))
        stuck.release.set()
        answers = await asyncio.wait_for(asyncio.gather(*waiting[1:]), PATIENCE)
        assert all(answer.reward == 1 for answer in answers)


async def test_an_async_step_is_cancelled_and_closed_when_its_episode_is() -> None:
    closed = asyncio.Event()
    entered = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Waits(faulty.Good):
        async def step(self, reply: Any) -> Any:
            loop.call_soon_threadsafe(entered.set)
            await asyncio.Event().wait()

        def close(self) -> None:
            loop.call_soon_threadsafe(closed.set)

    async with hosting(env=Waits) as controller:
        await controller.ask(reset("e1"))
        await controller.begin(step("e1"))
        await asyncio.wait_for(entered.wait(), PATIENCE)
        await controller.send(protocol.CloseEpisode(episode="e1"))
        await asyncio.wait_for(closed.wait(), PATIENCE)
        assert "not alive" in (await controller.ask(step("e1"))).error


async def test_a_step_that_waits_for_a_thread_is_reported_and_begins_only_in_a_live_episode() -> None:
    began, entered, release = list[str](), threading.Event(), threading.Event()
    reports: list[tuple[str, bool]] = []

    class Holding(faulty.Good):
        def step(self, reply: Reply) -> Step:
            began.append(reply.text)
            entered.set()
            release.wait(PATIENCE)
            return Step(done=True)

    async def prototype(name: str, options: dict[str, Any]) -> Environment:
        return Holding()

    def report(call: str, queued: bool) -> None:
        reports.append((call, queued))

    calls = UserCodeExecutor(threads_per_job=1)
    episodes = Episodes(calls, prototype, asks_nobody, lambda reset: LLM("", "", []), asks_nobody, report)
    for name in "abc":
        await episodes.reset(reset(name))
    turns = {name: episodes.step(msgspec.structs.replace(step(name, text=name), call=name)) for name in "abc"}
    try:
        assert await asyncio.to_thread(entered.wait, PATIENCE)
        assert reports == [("b", True), ("c", True)]
        episodes.step(msgspec.structs.replace(step("c", text="c"), call="again"))  # after a reconnection
        episodes.close("b")
    finally:
        release.set()
    await asyncio.wait(turns.values(), timeout=PATIENCE)
    assert turns["b"].cancelled() and turns["c"].result().done and began == ["a", "c"]
    assert reports[2:] == [("again", True), ("again", False)]
    await episodes.close_all()
    calls.close()


async def test_a_plain_step_that_returns_an_awaitable_is_cancelled_and_closed_with_its_episode() -> None:
    begun, closed = threading.Event(), threading.Event()

    class Decorated(faulty.Good):
        def step(self, reply: Reply) -> Any:
            return self.endless()

        async def endless(self) -> Step:
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError

        def close(self) -> None:
            closed.set()

    async def prototype(name: str, options: dict[str, Any]) -> Environment:
        return Decorated()

    calls = UserCodeExecutor()
    episodes = Episodes(calls, prototype, asks_nobody, lambda reset: LLM("", "", []), asks_nobody, asks_nobody)
    await episodes.reset(reset("a"))
    turn = episodes.step(step("a"))
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    episodes.close("a")
    await asyncio.wait([turn], timeout=PATIENCE)
    assert turn.cancelled() and await asyncio.to_thread(closed.wait, PATIENCE)
    calls.close()


async def test_a_blocking_async_step_does_not_stop_heartbeats() -> None:
    class Blocks(faulty.Stuck):
        async def step(self, reply: Any) -> Any:  # what it should not do
            self.entered.release()
            self.release.wait()
            return faulty.Good.step(self, reply)

    blocks = Blocks()
    async with hosting(env=blocks, good=faulty.Good()) as controller:
        await controller.ask(reset("e1"))
        waiting = await controller.begin(step("e1"))
        await asyncio.to_thread(blocks.entered.acquire)
        before = len(controller.beats)
        await controller.ask(reset("e2", "good"))
        assert (await controller.ask(step("e2"))).reward == 1
        await asyncio.wait_for(controller.beaten(before + 3), PATIENCE)
        assert not waiting.done()
        blocks.release.set()
        assert (await asyncio.wait_for(waiting, PATIENCE)).reward == 1


def answering(status: HTTPStatus, body: str) -> Callable[[ServerConnection, Request], Response | None]:
    """A server's first answer to a connection; it accepts later ones."""
    answers = [(status, body)]

    def answer(link: ServerConnection, _: Request) -> Response | None:
        return link.respond(*answers.pop()) if answers else None

    return answer


@pytest.mark.parametrize("status", [HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN])
@pytest.mark.parametrize("body", ["<html>Forbidden</html>", "", "[]", '{"message": "Forbidden"}', '{"error": {}}'])
async def test_answer_of_a_proxy_is_no_refusal(status: HTTPStatus, body: str) -> None:
    controller = Controller()
    async with serve(controller.handle, "127.0.0.1", 0, process_request=answering(status, body)) as server:
        host = Host(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "key", {"env": faulty.Good()})
        running = asyncio.create_task(host.run())
        await asyncio.wait_for(controller.joined(), PATIENCE)
        await cancel_all(running)


async def test_refusal_of_the_service_before_the_hello_ends_the_host() -> None:
    refuse = answering(HTTPStatus.UNAUTHORIZED, '{"error": "the key is not known"}')
    async with serve(Controller().handle, "127.0.0.1", 0, process_request=refuse) as server:
        host = Host(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "key", {})
        with pytest.raises(UserError, match="refuses this environment host: the key is not known"):
            await asyncio.wait_for(host.run(), PATIENCE)


async def test_refused_host_process_ends_with_the_code_that_prevents_a_restart() -> None:
    controller = Controller()
    controller.refusal = "the key is not known"
    async with serve(controller.handle, "127.0.0.1", 0) as server:
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rookery.environments.host", "--connect", address,
            env={**os.environ, "ROOKERY_TOKEN": "key"},
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await asyncio.wait_for(process.communicate(), PATIENCE)
    assert process.returncode == EXIT_REFUSED
    assert said.decode().strip().endswith("refuses this environment host: the key is not known")


async def test_a_refused_host_gets_the_reason() -> None:
    controller = Controller()
    controller.refusal = "the key is not known"
    async with serve(controller.handle, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UserError, match="refuses this environment host: the key is not known"):
            await asyncio.wait_for(Host(f"http://127.0.0.1:{port}", "x", {}).run(), PATIENCE)
    with pytest.raises(UserError, match="the service's address: given 'nonsense'"):
        await Host("nonsense", "x", {}).run()


async def test_the_process_of_the_built_ins_dies_with_its_parent() -> None:
    controller = Controller()
    async with serve(controller.handle, "127.0.0.1", 0) as controller.server:
        port = controller.server.sockets[0].getsockname()[1]
        command = [sys.executable, "-m", "rookery.environments.host", "--die-with-parent"]
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--connect", f"http://127.0.0.1:{port}"),
            stdin=subprocess.PIPE,
            env={**os.environ, "ROOKERY_TOKEN": "t\n"},
        )
        try:
            hello = await asyncio.wait_for(controller.joined(), PATIENCE)
            assert controller.authorization == "Bearer t"  # a file has a newline after it
            assert {offer.name for offer in hello.environments} == {f"builtin:{id}" for id in BUILTINS}
            options = {"rows": [{"prompt": "Say 3.", "answer": 3}], "verifier": "exact"}
            listed = await controller.ask(prompts("builtin:jsonl", count=1, **options))
            message = reset("e1", "builtin:jsonl", **options)
            message.prompt = listed.prompts[0]
            assert (await controller.ask(message)).messages == [protocol.ChatMessage(role="user", content="Say 3.")]
            assert (await controller.ask(step("e1"))).reward == 1
            assert process.stdin is not None
            process.stdin.close()
            assert await asyncio.wait_for(process.wait(), PATIENCE) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
