"""Agents that drive their episodes by the real ``openai`` client: hosted ones, and programs that open episodes over
HTTP, on a worker that replies with one of two texts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import httpx
import msgspec
import openai
import pytest
from openai import OpenAI
from tests.support.faces import MODEL, TEMPLATE, ThreadedWorker, served, tokenizer, write_model
from tests.support.waiting import until

import rookery
from rookery import protocol
from rookery.aio import cancel_all
from rookery.cli.jobs import conversation_lines
from rookery.client.connection import Record, record
from rookery.controller.jobs import agent_calls
from rookery.controller.jobs.job_context import Progress
from rookery.controller.quotas import Quotas
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.environments.episodes import UserCodeExecutor
from rookery.server.launcher import EmbeddedService
from rookery.server.routes import openai as openai_routes
from rookery.storage.repositories import jobs
from rookery.tokenization.registry import CONFIG, model_folder

ENDED = ("completed", "failed", "paused", "cancelled")
QUESTION = "What is 2 + 2?"
ADD: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = 'So:\n<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>'
JOB: dict[str, Any] = {
    "base_model": MODEL,
    "policies": {"main": {"rank": 4, "targets": ["q"]}},
    "algorithm": {"group_size": 4, "groups_per_step": 1, "max_staleness": 0},
    "sampling": {"max_tokens": 8},
    "stop": {"steps": 2},
}


class Recording(ThreadedWorker):
    """It keeps the training batches, and what it was asked to generate."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.batches: list[bytes] = []
        self.asked: list[protocol.Generate] = []
        self.stuck = False
        """Whether replies stay without an end."""

    async def _reply(self, message: protocol.ToWorker, http: httpx.AsyncClient) -> protocol.EpochMessage | None:
        if isinstance(message, protocol.ForwardBackward):
            self.batches.append((await http.get(f"/wire/batches/{message.batch_ticket}")).content)
        if isinstance(message, protocol.Generate):
            self.asked.append(message)
        reply = await super()._reply(message, http)
        if self.stuck and isinstance(reply, protocol.Output):
            (chunk,) = reply.chunks
            begun = msgspec.structs.replace(chunk, tokens=chunk.tokens[:1], logprobs=chunk.logprobs[:1], finish="")
            return protocol.Output(chunks=[begun])
        return reply


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with served(tmp_path_factory.mktemp("agents"), failure_rate_window=1000) as service:
        yield service


@pytest.fixture(scope="module")
def worker(service: EmbeddedService) -> Iterator[Recording]:
    with Recording.of(service) as worker:
        yield worker


class Keyed(rookery.Client):
    """It can send any request."""

    def __init__(self, service: EmbeddedService) -> None:
        super().__init__(service.url, service.key)
        self.http = httpx.Client(
            base_url=f"{service.url}/api/v1",
            headers={"Authorization": f"Bearer {service.key}"},
            timeout=70,
            # httpcore may close an idle connection beyond a limit just as another of two hundred threads takes it
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None),
        )

    def read(self, path: str, **params: Any) -> Record:
        found: Record = record(self.http.get(path, params=params).raise_for_status().json())
        return found


@pytest.fixture
def client(service: EmbeddedService, worker: Recording) -> Iterator[Keyed]:
    with Keyed(service) as client:
        yield client


class Twice(rookery.Agent):
    """Asks, and asks again."""

    def prompts(self, split: str) -> list[dict[str, Any]]:
        return [{"number": number} for number in range(4 if split == "train" else 2)]

    async def run(self, task: Any, llm: rookery.LLM) -> rookery.Outcome:
        messages: list[Any] = [{"role": "user", "content": f"{QUESTION} {task['number']}"}]
        for _ in range(2):
            reply = (await llm.client.chat.completions.create(model=llm.model, messages=messages)).choices[0].message
            messages += [reply.to_dict(), {"role": "user", "content": "Sure?"}]
        texts = [message["content"] for message in messages if message["role"] == "assistant"]
        return rookery.Outcome(reward=texts.count("4") + 0.5 * (texts[0] == "4"), metrics={"right": texts.count("4")})


class TwiceInSteps(rookery.Environment):
    """The agent above, as an environment."""

    def prompts(self, split: str) -> list[dict[str, Any]]:
        return Twice().prompts(split)

    def reset(self, prompt: Any, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{QUESTION} {prompt['number']}"}]

    def step(self, reply: rookery.Reply) -> rookery.Step:
        if reply.turn == 0:
            return rookery.Step(messages=[{"role": "user", "content": "Sure?"}], reward=1.5 * (reply.text == "4"))
        right = sum(message["content"] == "4" for message in reply.messages)
        return rookery.Step(reward=float(reply.text == "4"), done=True, metrics={"right": right})


def ends(job: rookery.Job) -> Record:
    until(lambda: job.show().state in ENDED)
    return job.show()


def episodes(client: Keyed, job: str, **chosen: Any) -> list[Record]:
    return [*client.read(f"/jobs/{job}/episodes", **chosen).episodes]


def reading(client: Keyed, job: str, episode: Record) -> Record:
    return client.read(f"/jobs/{job}/episodes/{episode.episode}")


# --- hosted agents ----------------------------------------------------------------------------------------------------


def test_gradient_of_an_agent_is_that_of_the_same_environment(client: Keyed, worker: Recording) -> None:
    found: list[list[bytes]] = []
    for environment in (TwiceInSteps(), Twice()):
        worker.batches.clear()
        job = client.train(environment=environment, new=True, evaluation={"prompts": 2}, **JOB)
        view = ends(job)
        assert view.state == "completed", view.reason
        assert view.counters.trajectory_splits == 0 and view.counters.get("episodes_failed", 0) == 0
        assert [row.prompts for row in job.evaluations()] == [2, 2]
        found.append(list(worker.batches))
    assert found[0] == found[1] and len(found[0]) >= 1, "bit for bit"


def test_episode_of_an_agent_is_read_as_any_other(client: Keyed) -> None:
    job = client.train(environment=Twice(), new=True, **JOB)
    ends(job)
    for episode in episodes(client, job.id):
        whole = reading(client, job.id, episode)
        assert [message.role for message in whole.messages] == ["user", "assistant"] * 2
        assert [turn.finish for turn in whole.turns] == ["stop", "stop"]
        (strip,) = whole.trajectories
        assert sum(strip.mask) == episode.tokens and episode.metrics == {"right": episode.replies.count("4")}
        assert "".join(strip.texts).count("<|im_end|>") == 3
        assert whole.seconds.generation > 0


class Faulty(Twice):
    """Each task fails in another way, or not at all."""

    how: ClassVar[list[str]] = []

    def prompts(self, split: str) -> list[dict[str, Any]]:
        return [{"number": number} for number in range(len(self.how))]

    async def run(self, task: Any, llm: rookery.LLM) -> Any:
        message: Any = {"role": "user", "content": QUESTION}
        chat = llm.client.chat.completions.create
        match self.how[task["number"]]:
            case "no call":
                return rookery.Outcome(1.0)
            case "raises":
                await chat(model=llm.model, messages=[message])
                raise ValueError("the tool broke\nbadly")
            case "other model":
                await chat(model="gpt-4o", messages=[message])
            case "other model, caught":
                with contextlib.suppress(openai.NotFoundError):
                    await chat(model="gpt-4o", messages=[message])
                return rookery.Outcome(1.0)
            case "no outcome":
                await chat(model=llm.model, messages=[message])
                return 1.0
            case "no number":
                await chat(model=llm.model, messages=[message])
                return rookery.Outcome(reward=float("nan"))
            case "stuck":
                await chat(model=llm.model, messages=[message])
                await asyncio.Event().wait()
            case "not sampled plainly":
                await chat(model=llm.model, messages=[message], top_p=0.5)
                return rookery.Outcome(1.0)
            case "too many calls":
                for _ in range(4):
                    await chat(model=llm.model, messages=[message])
        return rookery.Outcome(1.0)


FAILURES = {
    "no call": "its agent ended without a reply of a policy",
    "raises": "ValueError: the tool broke badly (",
    "other model": "no model 'gpt-4o' in an agent's episode: it samples from the job's policies alone; give main",
    "other model, caught": "its agent ended without a reply of a policy: 1 call was refused (model gpt-4o)",
    "no outcome": "run returned float, not a rookery.Outcome",
    "no number": "Faulty.run gave the reward nan (float), expected a finite number (",
    "not sampled plainly": "none of its agent's 1 call can be trained on: they change how tokens are sampled",
    "too many calls": "the episode has had its 3 replies (environment.max_turns)",
}


def test_each_failure_of_an_agent_is_counted_with_one_line(client: Keyed) -> None:
    Faulty.how = list(FAILURES)
    job = client.train(
        environment={"hosted": Faulty(), "max_turns": 3}, new=True, shuffle=False,
        **{**JOB, "algorithm": {"group_size": 2, "groups_per_step": len(FAILURES)}},
    )  # fmt: skip

    def lines() -> dict[int, str]:
        return {row.prompt["number"]: row.error for row in episodes(client, job.id, failed=True, limit=100)}

    until(lambda: len(lines()) == len(FAILURES))
    job.cancel()
    found = lines()
    for number, (how, line) in enumerate(FAILURES.items()):
        assert line in found[number], how
        assert "\n" not in found[number]


def errors(client: Keyed, job: rookery.Job) -> set[str]:
    return {row.error for row in episodes(client, job.id, failed=True)}


def test_an_agent_that_is_stuck_after_a_reply_fails(client: Keyed) -> None:
    Faulty.how = ["stuck"]
    job = client.train(environment={"hosted": Faulty(), "step_timeout": "1s"}, new=True, **JOB)
    line = "its agent made no call for 1 s (environment.step_timeout), after 1 reply"
    until(lambda: any(line in error for error in errors(client, job)), lambda: errors(client, job))
    job.cancel()


A_WHILE = 0.5
"""Far below the time limit :data:`LIMIT` of a step, and above a seventh of it."""

LIMIT = "3s"


class Plain(rookery.Agent):
    """It works for a while and calls, or never returns until ``free`` is set."""

    free: threading.Event | None = None

    def prompts(self, split: str) -> list[dict[str, Any]]:
        return [{"number": number} for number in range(4)]

    def run(self, task: Any, llm: rookery.LLM) -> rookery.Outcome:
        if self.free is not None:
            self.free.wait()
        time.sleep(A_WHILE)
        messages: Any = [{"role": "user", "content": QUESTION}]
        llm.sync_client.chat.completions.create(model=llm.model, messages=messages)
        return rookery.Outcome(1.0)


@pytest.fixture
def one_thread_per_job(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, asyncio.Semaphore] = {}
    monkeypatch.setattr(UserCodeExecutor, "thread_limit", lambda _, job: limits.setdefault(job, asyncio.Semaphore(1)))


@pytest.mark.usefixtures("one_thread_per_job")
def test_a_plain_agent_that_waits_for_a_thread_is_not_silent(client: Keyed) -> None:
    """Eight agents run one after the other: the last one begins after the limit."""
    environment = {"hosted": Plain(), "step_timeout": LIMIT}
    algorithm = {"group_size": 4, "groups_per_step": 2}
    job = client.train(environment=environment, new=True, **{**JOB, "algorithm": algorithm, "stop": {"steps": 1}})
    view = ends(job)
    assert view.state == "completed", view.reason
    assert view.counters.get("episodes_failed", 0) == 0


class Slow(rookery.Environment):
    """Its plain steps take a while, or do not return until ``free`` is set."""

    free: threading.Event | None = None

    def prompts(self, split: str) -> list[dict[str, Any]]:
        return [{"number": number} for number in range(4)]

    def reset(self, prompt: Any, seed: int) -> list[Any]:
        return [{"role": "user", "content": QUESTION}]

    def step(self, reply: rookery.Reply) -> rookery.Step:
        if self.free is not None:
            self.free.wait()
        time.sleep(A_WHILE)
        return rookery.Step(reward=float(len(reply.text)), done=True)


@pytest.mark.usefixtures("one_thread_per_job")
def test_a_plain_step_that_waits_for_a_thread_is_not_late(client: Keyed) -> None:
    """Eight steps run one after the other: the last one begins after the limit."""
    environment = {"hosted": Slow(), "step_timeout": LIMIT}
    algorithm = {"group_size": 4, "groups_per_step": 2}
    job = client.train(environment=environment, new=True, **{**JOB, "algorithm": algorithm, "stop": {"steps": 1}})
    view = ends(job)
    assert view.state == "completed", view.reason
    assert view.counters.get("episodes_failed", 0) == 0


class HeldStep(Slow):
    free = threading.Event()


class HeldAgent(Plain):
    free = threading.Event()


@pytest.mark.usefixtures("one_thread_per_job")
@pytest.mark.parametrize(
    ("held", "keeps", "waits"),
    [
        (HeldStep, "step was not answered within 0.5 s", r"(step|reset) waited 0\.5 s for a thread of its host"),
        (
            HeldAgent,
            r"its agent made no call for 0\.5 s \(environment\.step_timeout\), after 0 replies",
            r"its agent waited 0\.5 s \(environment\.step_timeout\) for a thread of its host",
        ),
    ],
)
def test_calls_that_keep_all_threads_and_those_that_wait_for_one_fail(
    client: Keyed, held: type[HeldStep | HeldAgent], keeps: str, waits: str
) -> None:
    held.free.clear()
    job = client.train(environment={"hosted": held(), "step_timeout": "0.5s"}, new=True, **JOB)
    try:
        for line in (keeps, waits):
            until(lambda line=line: any(re.search(line, error) for error in errors(client, job)),
                  lambda: errors(client, job))  # fmt: skip
    finally:
        job.cancel()
        held.free.set()


class Team(Twice):
    """A solver, and a critic that is the base model: each call names its policy."""

    async def run(self, task: Any, llm: rookery.LLM) -> rookery.Outcome:
        assert llm.models == ["solver", "critic"] and llm.model == "solver"
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for name in ("solver", "critic", "solver"):
            reply = (await llm.client.chat.completions.create(model=name, messages=messages)).choices[0].message
            messages += [reply.to_dict(), {"role": "user", "content": f"{name}?"}]
        return rookery.Outcome(1.0, rewards={"solver": float(messages[1]["content"] == "4")})


def test_a_call_names_the_policy_that_replies(client: Keyed, worker: Recording) -> None:
    worker.asked.clear()
    policies = {"solver": {"rank": 4, "targets": ["q"]}, "critic": {"train": False, "base": True}}
    job = client.train(environment=Team(), new=True, **{**JOB, "policies": policies})
    view = ends(job)
    assert view.state == "completed", view.reason
    for episode in episodes(client, job.id):
        whole = reading(client, job.id, episode)
        assert [turn.policy for turn in whole.turns] == ["solver", "critic", "solver"]
    asked = [request for request in worker.asked if request.request.startswith(job.id)]
    assert {request.adapter is None for request in asked if request.request.endswith(".1")} == {True}
    assert all(request.adapter is not None for request in asked if request.request.endswith((".0", ".2")))


# --- over HTTP --------------------------------------------------------------------------------------------------------


class Driver:
    """A job whose episodes this process opens."""

    def __init__(self, client: Keyed, **changes: Any) -> None:
        environment = {"id": "agent", "rows": [{"prompt": f"{n}?", "n": n} for n in range(4)], "eval_last": 1}
        environment |= changes.pop("environment", {})
        self.client = client
        self.job = client.submit({"name": "driven", "environment": environment, **JOB, **changes})

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.http.post(f"/jobs/{self.job.id}/episodes{path}", json=body)

    def open(self) -> Any:
        until(lambda: self.job.show().state == "running")

        def opened() -> Record | None:
            answer = self.post("", wait=20)
            assert answer.status_code == 200, answer.text
            return Record(answer.json()) if answer.json()["episode"] else None

        return until(opened)

    def finish(self, episode: Any, reward: float = 1.0, **more: Any) -> httpx.Response:
        return self.post(f"/{episode.episode}/finish", reward=reward, **more)

    def read(self, episode: Any) -> Record:
        return reading(self.client, self.job.id, episode)


@contextlib.contextmanager
def opened(driver: Driver) -> Iterator[tuple[Any, OpenAI]]:
    episode = driver.open()
    with OpenAI(base_url=episode.base_url, api_key=episode.key, max_retries=0) as llm:
        yield episode, llm


def ask(llm: OpenAI, *messages: Any, **options: Any) -> Any:
    asked = [{"role": "user", "content": text} if isinstance(text, str) else text for text in messages]
    return llm.chat.completions.create(**{"model": "main", "messages": asked, **options})


def give_up(llm: OpenAI, text: str, when: Callable[[], bool]) -> None:
    """Ask, and disconnect without an answer as soon as ``when`` holds."""

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
            asked = client.chat.completions.create(model="main", messages=[{"role": "user", "content": text}])
            call = asyncio.create_task(asked)
            await asyncio.to_thread(until, when)
            assert not call.done()
            await cancel_all(call)

    asyncio.run(main())


@pytest.fixture
def driver(client: Keyed) -> Iterator[Driver]:
    driver = Driver(client)
    yield driver
    with contextlib.suppress(rookery.RookeryError):
        driver.job.cancel()


def test_a_program_opens_drives_and_finishes_every_episode(client: Keyed) -> None:
    driver = Driver(client, evaluation={"prompts": 1})
    splits = set()
    while True:
        answer = driver.post("", wait=1)
        if answer.status_code == 410 or driver.job.show().state in ENDED:
            break
        if answer.status_code != 200 or not (episode := Record(answer.json())).episode:
            continue
        assert episode.task["prompt"] == f"{episode.task['n']}?" and episode.models == ["main"]
        splits.add(episode.split)
        with OpenAI(base_url=episode.base_url, api_key=episode.key) as llm:
            plain = {} if episode.split == "train" else {"temperature": 0}
            text = ask(llm, episode.task["prompt"], **plain).choices[0].message.content
        ended = driver.finish(episode, float(text == "4"), metrics={"length": len(text)}).json()
        assert ended == {"episode": episode.episode, "state": "done", "error": None}
    view = driver.job.show()
    assert view.state == "completed", view.reason
    assert splits == {"train", "eval"} and view.counters.episodes >= 8
    assert [row.prompts for row in driver.job.evaluations()] == [1, 1]
    assert driver.post("", wait=0).status_code == 410
    rows = list(driver.job.metrics())
    assert [row["reward/length"] for row in rows] and len(rows) == 2


def test_an_episode_has_the_address_that_its_program_used(driver: Driver) -> None:
    until(lambda: driver.job.show().state == "running")
    proxied = {"Host": "rookery.example.org", "X-Forwarded-Proto": "https"}
    path = f"/jobs/{driver.job.id}/episodes"
    opened = driver.client.http.post(path, json={"wait": 60}, headers=proxied).raise_for_status().json()
    base = f"https://rookery.example.org/agents/{opened['episode']}"
    assert (opened["base_url"], opened["token_url"]) == (f"{base}/v1", f"{base}/inference/v1")


def test_branches_share_their_prefix_and_each_token_is_trained_on_once(driver: Driver, worker: Recording) -> None:
    with opened(driver) as (episode, llm):
        assert ask(llm, "a?").choices[0].finish_reason == "stop"
        first = ask(llm, "b?").choices[0].message.to_dict()
        second = ask(llm, "b?", first, "c?").choices[0].message.to_dict()
        ask(llm, "b?", first, "d?")
        ask(llm, "b?", first, "c?", second, "e?")
        changed = {**first, "content": "something else"}
        ask(llm, "b?", changed, "c?")
        assert driver.finish(episode).status_code == 200
        read = driver.read(episode)
    assert len(read.trajectories) == 4
    whole = [[*strip.prompt, *strip.tokens] for strip in read.trajectories]
    trained = sum(sum(strip.mask) for strip in read.trajectories)
    assert trained == sum(turn.tokens for turn in read.turns) and len(read.turns) == 6
    texts = ["".join([*strip.prompt_texts, *strip.texts]) for strip in read.trajectories]
    assert ["c?" in text and "e?" in text for text in texts] == [False, True, False, False]
    assert whole[1][: len(read.trajectories[2].prompt)] == read.trajectories[2].prompt
    caches = {request.episode for request in worker.asked if request.request.startswith(episode.episode)}
    assert len(caches) == 4
    assert not any(read.trajectories[2].mask[: len(first["content"]) + 1]), "the branch does not train it again"
    assert [turn.follows for turn in read.turns] == [None, -1, None, None, 1, -1]
    asked = [read.messages[turn.message - 1].content for turn in read.turns]
    assert asked == ["a?", "b?", "c?", "e?", "d?", "c?"], "a reply that the agent changed is no turn"
    shown = conversation_lines(read)
    assert [line for line in shown if line.startswith("—")] == [
        "— another conversation —", "— after turn 2 —", "— another conversation —"
    ]  # fmt: skip


def test_calls_at_once_are_all_recorded_with_different_randomness(driver: Driver, worker: Recording) -> None:
    with opened(driver) as (episode, llm), ThreadPoolExecutor(12) as pool:
        until(lambda: llm.models.list().data)
        for future in [pool.submit(ask, llm, f"{number % 2}?", max_tokens=8) for number in range(8)]:
            future.result()
        driver.finish(episode)
    requests = [request for request in worker.asked if request.request.startswith(f"{episode.episode}.")]
    assert sorted(request.request for request in requests) == [f"{episode.episode}.{n}" for n in range(8)]
    assert len({request.seed for request in requests}) == 8
    assert len(driver.read(episode).turns) == 8


def test_every_face_is_recorded_token_by_token(driver: Driver, service: EmbeddedService) -> None:
    words = tokenizer(service.settings.cache.parent)
    with opened(driver) as (episode, llm):
        streamed = "".join(
            chunk.choices[0].delta.content or "" for chunk in ask(llm, "a?", stream=True) if chunk.choices
        )
        counted = llm.responses.input_tokens.count(input="b?").input_tokens
        answer = llm.responses.create(input="b?")
        assert answer.usage and answer.usage.input_tokens == counted
        again = llm.responses.create(
            model="main", input=[{"role": "user", "content": "b?"}, *answer.output, {"role": "user", "content": "c?"}]
        )
        prompt = words.encode("xyz").ids
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 8}}
        headers = {"Authorization": f"Bearer {episode.key}"}
        face = httpx.post(f"{episode.token_url}/generate", json=body, headers=headers, timeout=60).json()["choices"][0]
        more = {"token_ids": [*prompt, *face["token_ids"], *prompt]}
        assert httpx.post(f"{episode.token_url}/generate", json=more, headers=headers, timeout=60).status_code == 200
        assert [model.id for model in llm.models.list()] == ["main"] and llm.models.retrieve("main").id == "main"
        with pytest.raises(openai.NotFoundError, match="give main"):
            llm.models.retrieve("gpt-4o")
        driver.finish(episode)
    read = driver.read(episode)
    assert [turn.finish for turn in read.turns] == ["stop"] * 5
    assert len(read.trajectories) == 3
    replies = [message.content for message in read.messages if message.role == "assistant"]
    assert replies[:3] == [streamed, answer.output_text, again.output_text]
    assert read.trajectories[2].prompt == prompt
    assert read.trajectories[2].tokens[: len(face["token_ids"])] == face["token_ids"]


def test_calls_that_change_the_sampling_are_read_and_not_trained_on(driver: Driver) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    changes: list[dict[str, Any]] = [
        {"top_p": 0.9}, {"temperature": 0.5}, {"frequency_penalty": 1.0}, {"response_format": schema},
        {"logit_bias": {"5": 1}}, {"extra_body": {"top_k": 5}},
    ]  # fmt: skip
    same: list[dict[str, Any]] = [
        {}, {"temperature": 1.0}, {"top_p": 1.0}, {"logprobs": True}, {"stop": ["never"]}, {"max_tokens": 7},
        {"seed": 5},
    ]  # fmt: skip
    driver.job.cancel()
    driver = Driver(driver.client, environment={"max_turns": 20})
    with opened(driver) as (episode, llm):
        for number, options in enumerate([*changes, *same]):
            reply = ask(llm, f"{number}?", **options).to_dict()
            assert reply.get("trainable", True) is (number >= len(changes)), options
        driver.finish(episode)
    read = driver.read(episode)
    assert [any(strip.mask) for strip in read.trajectories] == [False] * len(changes) + [True] * len(same)
    trained = sum(sum(strip.mask) for strip in read.trajectories)
    assert trained == sum(turn.tokens for turn in read.turns[len(changes) :])
    driver.job.cancel()


@pytest.mark.parametrize("call", [CALL, CALL.replace('{"a":1}', "{ }")], ids=["arguments", "no arguments"])
def test_calls_of_tools_keep_the_tokens_that_were_sampled(tmp_path: Path, call: str) -> None:
    """Which are not those that the template writes: it puts a space after each colon."""
    with served(tmp_path) as service:
        config = model_folder(service.settings.cache, MODEL) / CONFIG
        config.write_text(config.read_text().replace("512", "4096"))
        words = tokenizer(service.settings.cache.parent)
        token = (service.settings.data / "worker.token").read_text().strip()
        with Recording(service.url, token, words, (call, call)), Keyed(service) as client:
            driver = Driver(client, sampling={"max_tokens": 200})
            with opened(driver) as (episode, llm):
                reply = ask(llm, "a?", tools=[ADD]).choices[0].message
                result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "3"}
                ask(llm, "a?", reply.to_dict(), result, tools=[ADD])
                plain = ask(llm, "b?").choices[0].message
                assert not plain.tool_calls
                ask(llm, "b?", plain.to_dict(), "go on")
                assert driver.finish(episode).status_code == 200
            strips = driver.read(episode).trajectories
            sampled = words.encode(call).ids
            assert len(strips) == 2
            for strip in strips:
                assert strip.tokens[: len(sampled)] == sampled and all(strip.mask[: len(sampled) + 1])


def test_a_reply_is_continued_under_the_values_of_its_template_alone(tmp_path: Path) -> None:
    config = write_model(tmp_path / "cache") / "tokenizer_config.json"
    template = "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}" + TEMPLATE
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    values: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    with served(tmp_path) as service, Recording.of(service), Keyed(service) as client:
        driver = Driver(client)
        with opened(driver) as (episode, llm):
            first = ask(llm, "a?", **values).choices[0].message.to_dict()
            ask(llm, "a?", first, "b?", **values)
            ask(llm, "a?", first, "c?")
            assert driver.finish(episode).status_code == 200
        strips = driver.read(episode).trajectories
    texts = ["".join([*strip.prompt_texts, *strip.texts]) for strip in strips]
    assert [("<no>" in text, "b?" in text, "c?" in text) for text in texts] == [
        (True, True, False),
        (False, False, True),
    ]


# --- keys, ends, faults -----------------------------------------------------------------------------------------------


def refused(llm: OpenAI, kind: type[openai.APIStatusError], line: str, **options: Any) -> None:
    with pytest.raises(kind) as found:
        ask(llm, "a?", **options)
    assert line in found.value.message and "\n" not in found.value.message


def test_a_key_opens_its_episode_while_it_runs_and_no_other(driver: Driver, service: EmbeddedService) -> None:
    with opened(driver) as (episode, llm):
        refused(llm, openai.NotFoundError, "no model 'gpt-4o'", model="gpt-4o")
        other = driver.open()
        strange = OpenAI(base_url=other.base_url, api_key=episode.key, max_retries=0)
        refused(strange, openai.AuthenticationError, "does not open the episode")
        strange = OpenAI(base_url=episode.base_url, api_key=service.key, max_retries=0)
        refused(strange, openai.AuthenticationError, "does not open the episode")
        refused(OpenAI(base_url=f"{service.url}/v1", api_key=episode.key, max_retries=0), openai.AuthenticationError,
                "this is an agent's key", model=MODEL)  # fmt: skip
        headers = {"Authorization": f"Bearer {episode.key}"}
        for path in ("", f"/{episode.episode}/finish", f"/{other.episode}/finish"):  # an agent that would train itself
            url = f"{service.url}/api/v1/jobs/{driver.job.id}/episodes{path}"
            assert httpx.post(url, json={"reward": 1}, headers=headers, timeout=60).status_code == 401
        with pytest.raises(openai.NotFoundError, match="nothing at /v1/embeddings"):
            llm.embeddings.create(model="main", input="x")
        ask(llm, "a?", model="")
        assert driver.finish(episode, 1.0).status_code == 200
        refused(llm, openai.APIStatusError, "has ended (done): its key opens nothing any more")
        again = driver.finish(episode, 0.0)
        assert again.status_code == 410 and "it is done" in again.text
        assert driver.read(episode).reward == 1.0


def test_calls_after_the_end_count_as_requests_of_the_tenant(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(driver) as (episode, llm):
        ask(llm, "a?")
        assert driver.finish(episode).status_code == 200
        counted: list[str] = []
        monkeypatch.setattr(Quotas, "count_request", lambda quotas, tenant: counted.append(tenant))
        refused(llm, openai.APIStatusError, "has ended (done)")
        strange = OpenAI(base_url=episode.base_url, api_key=f"{episode.key}0", max_retries=0)
        refused(strange, openai.AuthenticationError, "does not open the episode")
        assert len(counted) == 1


def test_another_tenant_finds_no_episode(driver: Driver, service: EmbeddedService) -> None:
    episode = driver.open()
    tenant = driver.client.add_tenant("stranger")
    key = driver.client.http.post(f"/tenants/{tenant.id}/keys", json={"role": "tenant"}).json()["key"]
    for path in ("", f"/{episode.episode}/finish", f"/{episode.episode}/fail"):
        url = f"{service.url}/api/v1/jobs/{driver.job.id}/episodes{path}"
        answer = httpx.post(
            url, json={"reward": 1, "reason": "x"}, headers={"Authorization": f"Bearer {key}"}, timeout=60
        )
        assert answer.status_code in (404, 422), answer.text
    answer = driver.post(f"/{driver.job.id}-g0-99/finish", reward=1)
    assert answer.status_code == 404 and "no episode" in answer.text


def test_failed_and_abandoned_episodes_are_counted(driver: Driver) -> None:
    with opened(driver) as (episode, llm):
        ask(llm, "a?")
        assert driver.post(f"/{episode.episode}/fail", reason="the\ntool broke").json()["state"] == "failed"
    (row,) = until(lambda: episodes(driver.client, driver.job.id, failed=True))
    assert (row.episode, row.error) == (episode.episode, "its agent failed: the tool broke")
    driver.job.cancel()
    driver = Driver(driver.client, environment={"step_timeout": "1s"})
    gone = driver.open()  # opened, and nothing more
    rows = until(lambda: episodes(driver.client, driver.job.id, failed=True))
    lines = {row.episode: row.error for row in rows}
    assert "made no call for 1 s (environment.step_timeout), after 0 replies" in lines[gone.episode]
    driver.job.cancel()


def test_a_job_that_no_program_attends_pauses_with_the_reason(client: Keyed) -> None:
    driver = Driver(client, environment={"return_timeout": "1s"})
    until(lambda: driver.job.show().state == "paused")
    assert "no process opens the job's episodes" in driver.job.show().reason
    driver.job.cancel()


def test_running_calls_end_with_their_episode(driver: Driver, worker: Recording) -> None:
    with opened(driver) as (episode, llm), ThreadPoolExecutor(2) as pool:
        ask(llm, "a?")
        running = pool.submit(ask, llm, "b?", stream=True)
        with contextlib.suppress(openai.APIError):
            running.result()
        assert driver.finish(episode).status_code == 200
        refused(llm, openai.APIStatusError, "has ended")


def test_an_end_that_cannot_count_is_answered_so(driver: Driver) -> None:
    with opened(driver) as (episode, llm):
        answer = driver.finish(episode).json()
        assert answer["state"] == "failed" and "its agent ended without a reply" in answer["error"]
        (row,) = episodes(driver.client, driver.job.id, failed=True)
        assert row.error == answer["error"]
        assert "has ended: it is failed (its agent ended without a reply" in driver.finish(episode).text
    with opened(driver) as (episode, llm):
        ask(llm, "a?", top_p=0.5)
        assert "can be trained on" in driver.finish(episode).json()["error"]


def test_the_end_of_an_earlier_attempt_at_a_held_out_episode_ends_no_later_one(client: Keyed) -> None:
    driver = Driver(client, evaluation={"prompts": 1})

    def held_out() -> Any:
        while (episode := driver.open()).split != "eval":
            pass
        return episode

    first = held_out()
    driver.job.pause()
    driver.job.resume()
    second = held_out()
    assert second.task == first.task and second.seed == first.seed and second.episode != first.episode
    late = driver.post(f"/{first.episode}/fail", reason="its calls failed")
    assert late.status_code == 410, late.text
    with OpenAI(base_url=second.base_url, api_key=second.key, max_retries=0) as llm:
        ask(llm, "a?")
    assert driver.finish(second).json()["state"] == "done"
    driver.job.cancel()


def test_an_end_that_was_not_stored_can_be_repeated(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Progress.store

    async def held(progress: Progress, work: Any, *arguments: Any, **named: Any) -> Any:
        if work is jobs.finish_episode:
            await asyncio.Event().wait()
        return await store(progress, work, *arguments, **named)

    with opened(driver) as (episode, llm), ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        ask(llm, "a?")
        patch.setattr(Progress, "store", held)
        ending = pool.submit(driver.finish, episode, 0.5)
        until(lambda: httpx.get(f"{episode.base_url}/models", headers=llm.auth_headers, timeout=60).status_code != 200)
        driver.job.pause()
        answer = ending.result(60)
        assert answer.status_code == 503 and "was not stored" in answer.text
        patch.undo()
        driver.job.resume()
        until(lambda: driver.finish(episode, 0.25).status_code == 200)
        assert driver.read(episode).reward == 0.25


def test_a_call_whose_response_was_lost_gets_the_reply_that_was_sampled(
    driver: Driver, worker: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client was gone when the reply was being stored."""
    store, stored = Progress.store, threading.Event()

    async def slow(progress: Progress, work: Any, *arguments: Any, **named: Any) -> Any:
        await store(progress, work, *arguments, **named)
        if work is jobs.save_turns:
            stored.set()
            await asyncio.Event().wait()

    with opened(driver) as (episode, llm), monkeypatch.context() as patch:
        patch.setattr(Progress, "store", slow)
        give_up(llm, "a?", stored.is_set)
        patch.undo()
        text = ask(llm, "a?").choices[0].message.content
        asked = [request.request for request in worker.asked if request.request.startswith(episode.episode)]
        assert len(asked) == 1
        ask(llm, "a?")
        assert driver.finish(episode).status_code == 200
        turns = driver.read(episode).turns
    assert len(turns) == 2 and text in ("4", "five"), "only one whose response was lost is repeated"


@pytest.fixture
def one_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens of an episode are stored as the model's context has."""
    monkeypatch.setattr(agent_calls, "STORED_CONTEXTS", 1)


@pytest.mark.usefixtures("one_context")
def test_the_tokens_of_an_episode_have_a_bound(driver: Driver) -> None:
    with opened(driver) as (episode, llm):
        used = 0
        while used < 512:  # the context of the model
            usage = ask(llm, f"{used} {'a b ' * 40}").usage
            used += usage.total_tokens
        refused(llm, openai.BadRequestError, "1 times the model's context of tokens")
        assert driver.finish(episode).status_code == 200


@pytest.mark.usefixtures("one_context")
def test_calls_in_flight_count_as_stored_tokens(driver: Driver, worker: Recording) -> None:
    with opened(driver) as (episode, llm), ThreadPoolExecutor(8) as threads:
        worker.stuck, limited = True, llm.with_options(timeout=5)
        try:
            calls = [threads.submit(ask, limited, f"{number} {'a b ' * 60}") for number in range(8)]
            ended = [call.exception() for call in calls]
        finally:
            worker.stuck = False
        lines = [error.message for error in ended if isinstance(error, openai.BadRequestError)]
        assert 0 < len(lines) < 8 and all("calls in flight included" in line for line in lines)
        assert any(isinstance(error, openai.APITimeoutError) for error in ended), "those before the bound are sampled"

        def answered() -> bool:
            with contextlib.suppress(openai.BadRequestError):
                return bool(ask(llm, "a?").usage)
            return False

        until(answered, "a call that has ended does not count")
        assert driver.finish(episode).status_code == 200


def test_a_call_without_a_limit_counts_as_long_as_the_job_lets_it_be(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = JOB["sampling"]["max_tokens"]
    monkeypatch.setattr(openai_routes, "MAX_LOGPROBS", most * 3)
    with opened(driver) as (_, llm):
        for limit in ({}, {"max_tokens": 100_000}):
            line = f"logprobs: at most {most * 3}"
            refused(llm, openai.BadRequestError, line, logprobs=True, top_logprobs=3, **limit)
        [first, *_] = ask(llm, "a?", logprobs=True, top_logprobs=2).choices[0].logprobs.content
        assert len(first.top_logprobs) == 2


def test_nothing_is_kept_of_calls_that_an_agent_gave_up(
    driver: Driver, worker: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[int, int]] = []
    close = RolloutScheduler.close_episode

    def count(rollouts: RolloutScheduler, job: str, episode: str) -> None:
        before = len(rollouts.requests.of(job=job))
        close(rollouts, job, episode)
        kept.append((before, len(rollouts.requests.of(job=job))))

    monkeypatch.setattr(RolloutScheduler, "close_episode", count)
    with opened(driver) as (episode, llm):
        ask(llm, "a?")
        worker.stuck, before = True, len(worker.asked)
        try:
            give_up(llm, "b?", lambda: len(worker.asked) > before)
            with pytest.raises(openai.APITimeoutError):
                ask(llm.with_options(timeout=0.5), "b?")
        finally:
            worker.stuck = False
        assert driver.finish(episode).status_code == 200
    until(lambda: (1, 0) in kept)


def test_malformed_ends_are_refused(driver: Driver) -> None:
    with opened(driver) as (episode, llm):
        ask(llm, "a?")
        for body in ({}, {"reward": "x"}, {"reward": 1, "other": 1}, {"reward": 1, "metrics": {"a" * 300: 1}}):
            answer = driver.post(f"/{episode.episode}/finish", **body)
            assert answer.status_code == 422, body
        assert driver.post(f"/{episode.episode}/fail", reason=" ").status_code == 400
        assert driver.finish(episode, 1.0, rewards={"nobody": 1.0}).status_code == 200
    until(lambda: episodes(driver.client, driver.job.id, failed=True))
    assert "rewards the policy 'nobody'" in episodes(driver.client, driver.job.id, failed=True)[0].error


def test_environments_of_other_kinds_have_no_episodes_to_open(client: Keyed) -> None:
    rows = [{"prompt": "a", "answer": "4"}]
    job = client.submit({"name": "rows", "environment": {"id": "jsonl", "rows": rows, "verifier": "exact"}, **JOB})
    answer = client.http.post(f"/jobs/{job.id}/episodes", json={})
    assert answer.status_code == 409 and "is not {id: agent}" in answer.text
    job.cancel()


# --- many -------------------------------------------------------------------------------------------------------------

CALLS, MOST_TIMES = 150, 2.0
"""As much as a plain chat may a call within an episode cost, which is recorded."""


@pytest.mark.heavy
def test_call_of_an_agent_costs_little_more_than_a_plain_chat(client: Keyed, service: EmbeddedService) -> None:
    """In processor time of client, service and worker, which other work on the machine does not change."""
    driver = Driver(client, environment={"max_turns": 1000})
    with opened(driver) as (_, llm), OpenAI(base_url=f"{service.url}/v1", api_key=service.key) as plain:
        found = {"plain": 0.0, "agent": 0.0}
        for _ in range(CALLS):
            for name, face, model in (("plain", plain, MODEL), ("agent", llm, "main")):
                began = time.process_time()
                ask(face, QUESTION, model=model)
                found[name] += time.process_time() - began
    driver.job.cancel()
    ratio = found["agent"] / found["plain"]
    print(f"plain {1000 * found['plain'] / CALLS:.2f} ms, agent {1000 * found['agent'] / CALLS:.2f} ms: {ratio:.2f}")
    assert ratio < MOST_TIMES


@pytest.mark.heavy
def test_two_hundred_episodes_at_once_hold(client: Keyed) -> None:
    driver = Driver(
        client, algorithm={"group_size": 100, "groups_per_step": 2, "max_staleness": 0}, stop={"steps": 1}
    )  # fmt: skip
    until(lambda: driver.job.show().state == "running")
    with ThreadPoolExecutor(200) as pool:
        found = list(pool.map(lambda number: driver.post("", wait=60).json(), range(200)))
        assert len({episode["episode"] for episode in found}) == 200

        def work(episode: dict[str, Any]) -> int:
            with OpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=5) as llm:
                first = ask(llm, "a?").choices[0].message.to_dict()
                text = ask(llm, "a?", first, "b?").choices[0].message.content
            body = {"reward": float(text == "4")}
            return driver.post(f"/{episode['episode']}/finish", **body).status_code

        began = time.perf_counter()
        assert set(pool.map(work, found)) == {200}
        print(f"200 episodes of two calls in {time.perf_counter() - began:.1f} s")
    view = ends(driver.job)
    assert view.state == "completed", view.reason
    assert view.counters.episodes == 200 and view.counters.get("episodes_failed", 0) == 0
    assert view.counters.trajectory_splits == 0
