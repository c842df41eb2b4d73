"""Agents whose service, host or worker goes away: what was sampled stays, and nothing waits without end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from openai import OpenAI
from tests.server.test_agents import JOB, Driver, Keyed, Recording, Twice, ask, ends, episodes
from tests.storage.test_standby import Serving
from tests.support.faces import served, tokenizer, write_model
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE_SECONDS, until

import rookery
from rookery import protocol
from rookery.aio import LoopThread, unless
from rookery.environments.agent import RETRIES
from rookery.environments.host import Host
from rookery.settings import LimitSettings


class Held(Recording):
    """It gives no reply while it is to hold them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.held = threading.Event()

    async def _reply(self, message: protocol.ToWorker, http: httpx.AsyncClient) -> protocol.EpochMessage | None:
        if isinstance(message, protocol.Generate) and self.held.is_set():
            self.asked.append(message)
            return None
        return await super()._reply(message, http)


class Pausing(rookery.Agent):
    """After its first call it waits for the test, where the test says so."""

    called: ClassVar[list[str]] = []
    go: ClassVar[threading.Event] = threading.Event()

    def prompts(self, split: str) -> list[dict[str, Any]]:
        return [{"number": number} for number in range(2)]

    async def run(self, task: Any, llm: rookery.LLM) -> rookery.Outcome:
        messages: list[Any] = [{"role": "user", "content": f"{task['number']}?"}]
        reply = (await llm.client.chat.completions.create(model=llm.model, messages=messages)).choices[0].message
        self.called.append(reply.content or "")
        await asyncio.to_thread(self.go.wait)
        messages += [reply.to_dict(), {"role": "user", "content": "Sure?"}]
        await llm.client.chat.completions.create(model=llm.model, messages=messages)
        return rookery.Outcome(reward=float(reply.content == "4"))

    def for_episode(self) -> rookery.Environment:
        return self


class Replayed(Pausing):
    deterministic = True


@contextlib.contextmanager
def hosting(url: str, key: str, instance: str, environment: rookery.Environment) -> Iterator[LoopThread]:
    """A host that is gone for good when the block ends."""
    host = Host(url, key, {"agent": environment}, instance)
    thread = LoopThread(instance, lambda stopping: _until(stopping, host), daemon=True)
    try:
        yield thread
    finally:
        thread.stop(10)


async def _until(stopping: asyncio.Event, host: Host) -> None:
    await unless(stopping.wait(), host.run())


@pytest.mark.parametrize("kind", [Pausing, Replayed])
def test_agent_of_a_lost_host_runs_again_if_deterministic(kind: type[Pausing], tmp_path: Path) -> None:
    """With the replies that it had; another one fails and is counted."""
    Pausing.called.clear()
    Pausing.go.clear()
    with (
        served(tmp_path, failure_rate_window=1000) as service,
        Held.of(service) as worker,
        Keyed(service) as client,
    ):
        with hosting(service.url, service.key, "first", kind()):
            job = client.submit({
                "name": "lost", **JOB, "environment": {"hosted": "agent", "return_timeout": "120s"},
                "stop": {"steps": 1},
            })  # fmt: skip
            until(lambda: len(Pausing.called) == 4)
        first = {request.request: request for request in worker.asked}
        assert len(first) == 4
        Pausing.go.set()
        with hosting(service.url, service.key, "second", kind()):
            view = ends(job)
        assert view.state == "completed", view.reason
        failed = episodes(client, job.id, failed=True)
        if kind.deterministic:
            assert (not failed and Pausing.called[:4] == Pausing.called[4:8]) or sorted(Pausing.called[:4]) == sorted(
                Pausing.called[4:8]
            )
            assert len([one for one in worker.asked if one.request in first]) == 4, "no reply is sampled again"
        else:
            assert len(failed) == 4
            assert all("its environment host" in one.error for one in failed)


def test_a_call_waits_for_another_worker(tmp_path: Path) -> None:
    with served(tmp_path) as service, Keyed(service) as client, ThreadPoolExecutor(1) as pool:
        with Held.of(service) as worker:
            driver = Driver(client)
            episode = driver.open()
            llm = OpenAI(base_url=episode.base_url, api_key=episode.key, max_retries=0)
            ask(llm, "a?")
            worker.held.set()
            waiting = pool.submit(ask, llm, "b?")
            until(lambda: len(worker.asked) == 2)
        with Recording.of(service):
            assert waiting.result(PATIENCE_SECONDS).choices[0].message.content in ("4", "five")
            assert driver.finish(episode).status_code == 200
        assert len(driver.read(episode).turns) == 2
        driver.job.cancel()


def test_a_paused_job_gives_its_agents_an_error_that_passes(tmp_path: Path) -> None:
    with served(tmp_path) as service, Keyed(service) as client, Recording.of(service):
        driver = Driver(client)
        episode = driver.open()
        with OpenAI(base_url=episode.base_url, api_key=episode.key, max_retries=0) as llm:
            first = ask(llm, "a?").choices[0].message.to_dict()
            driver.job.pause()
            headers = {"Authorization": f"Bearer {episode.key}"}
            body = {"messages": [{"role": "user", "content": "b?"}]}
            refused = httpx.post(f"{episode.base_url}/chat/completions", json=body, headers=headers, timeout=60)
            assert refused.status_code == 503, refused.text
            repeated = RETRIES * int(refused.headers["Retry-After"])
            assert repeated > 2 * LimitSettings().outage_retry_seconds
            assert driver.finish(episode).status_code == 503
            driver.job.resume()
            until(lambda: driver.job.show().state == "running")
            ask(llm.with_options(max_retries=8), "a?", first, "c?")
        assert driver.finish(episode).status_code == 200
        (strip,) = driver.read(episode).trajectories
        turns = driver.read(episode).turns
        assert len(turns) == 2 and sum(strip.mask) == sum(turn.tokens for turn in turns)
        driver.job.cancel()
        late = httpx.post(f"{episode.base_url}/chat/completions", json=body, headers=headers, timeout=60)
        assert late.status_code == 410


@contextlib.contextmanager
def killed_at_the_end(folder: Path, port: str) -> Iterator[tuple[str, str]]:
    """(address, key) of a service on this port, with a worker, over the data of the one before."""
    with contextlib.ExitStack() as opened:
        service = Serving(folder, "data", f"sqlite:///{folder}/data/rookery.db", ROOKERY_PORT=port)
        opened.callback(service.kill)
        service.until("Rookery serves")
        key, token = ((service.data / name).read_text().strip() for name in ("admin.key", "worker.token"))
        opened.enter_context(Recording(service.url, token, tokenizer(folder)))
        yield service.url, key


def runs(http: httpx.Client, job: str) -> None:
    until(lambda: http.get(f"/jobs/{job}").json()["state"] == "running")


def opened(http: httpx.Client, job: str) -> dict[str, Any]:
    """An episode of the job."""

    def found() -> dict[str, Any] | None:
        answer: dict[str, Any] = http.post(f"/jobs/{job}/episodes", json={"wait": 30}).raise_for_status().json()
        return answer if answer["episode"] else None

    return until(found)


def advances(job: rookery.Job, steps: int) -> None:
    until(lambda: len(list(job.metrics(follow=False))) >= steps)


@pytest.mark.heavy
def test_killed_service_loses_nothing_of_an_agents_episode(tmp_path: Path) -> None:
    """The agent's client repeats its calls; the key, the replies and the episode stay."""
    write_model(tmp_path / "cache")
    port = str(free_port())
    episode, job, reads = None, "", []
    for life in range(3):
        with (
            killed_at_the_end(tmp_path, port) as (url, key),
            httpx.Client(base_url=f"{url}/api/v1", headers={"Authorization": f"Bearer {key}"}, timeout=70) as http,
        ):
            if life == 0:
                rows = [{"prompt": f"{number}?"} for number in range(4)]
                spec = {"name": "killed", **JOB, "environment": {"id": "agent", "rows": rows}}
                job = http.post("/jobs", json=spec).raise_for_status().json()["id"]
                runs(http, job)
                episode = opened(http, job)
            assert episode is not None
            with OpenAI(base_url=episode["base_url"], api_key=episode["key"], max_retries=12) as llm:
                said = [message for pair in reads for message in pair]
                reply = ask(llm, *said, f"turn {life}").choices[0].message.to_dict()
                reads.append((f"turn {life}", reply))
            if life == 2:
                runs(http, job)
                done = http.post(f"/jobs/{job}/episodes/{episode['episode']}/finish", json={"reward": 1.0})
                assert done.status_code == 200, done.text
                read = http.get(f"/jobs/{job}/episodes/{episode['episode']}").json()
                assert len(read["trajectories"]) == 1 and len(read["turns"]) == 3
                assert read["reward"] == 1.0


@pytest.mark.heavy
def test_hosted_agents_live_through_kills_of_the_service(tmp_path: Path) -> None:
    """No episode of the training fails: each continues where it was."""
    write_model(tmp_path / "cache")
    port, job = str(free_port()), ""
    with contextlib.ExitStack() as hosts:
        for life in range(5):
            with killed_at_the_end(tmp_path, port) as (url, key), rookery.Client(url, key) as client:
                if life == 0:
                    hosts.enter_context(hosting(url, key, "kept", Twice()))
                    spec = {"name": "hosted", **JOB, "environment": {"hosted": "agent"}, "stop": {"steps": 1_000_000}}
                    job = client.submit(spec).id
                before = len(list(client.job(job).metrics(follow=False)))
                advances(client.job(job), before + 2)
                time.sleep(0.05 * life)
                assert client.job(job).show().counters.get("episodes_failed", 0) == 0
