"""``{id: openenv}`` against a server of the real OpenEnv library, which has an environment of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.test_api import end_of
from tests.support.faces import ThreadedWorker, job, served, tokenizer
from tests.support.ports import free_port
from tests.support.waiting import until_healthy

from rookery.environments.base import Reply, Step
from rookery.environments.builtins import find
from rookery.environments.openenv import OpenEnv, SessionLost
from rookery.environments.outbound import set_reachable_hosts
from rookery.errors import UserError

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".bench" / "openenv" / "bin" / "python"

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not PYTHON.exists(), reason="openenv is not here: make test-environments"),
]


@contextmanager
def server(sessions: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    script = Path(__file__).with_name("openenv_server.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen([str(PYTHON), str(script), str(port), str(sessions)], env=environment)
    url = f"http://127.0.0.1:{port}"

    try:
        until_healthy(process, url)
        yield url, process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    set_reachable_hosts("127.0.0.1")
    with server(4) as (address, _):
        yield address
    set_reachable_hosts("")


def made(url: str, **options: Any) -> OpenEnv:
    built = find("openenv")({"url": url, "resets": [{"start": 3}, {"start": 1}], **options})
    assert isinstance(built, OpenEnv)
    return built


async def step(episode: Any, text: str) -> Step:
    found: Step = await episode.step(Reply(text, [], [], 0))
    return found


def played(play: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(play(), 60))  # type: ignore[arg-type]


def test_an_episode_is_a_session(url: str) -> None:
    async def play() -> None:
        episode: Any = made(url).for_episode()
        [first] = await episode.reset({"start": 3}, 7)
        shown = json.loads(first["content"])
        assert shown["observation"]["left"] == 3 and shown["observation"]["seed"] == 7
        assert "number" in shown["action_schema"]["properties"]
        second = await step(episode, '{"number": 1}')
        assert not second.done and second.reward == 0.0 and '"left": 2' in second.messages[0]["content"]
        refused = await step(episode, '{"number": "many"}')
        assert "VALIDATION_ERROR" in refused.messages[0]["content"] and refused.metrics["invalid"] == 1.0
        failed = await step(episode, '{"number": 99}')
        assert "EXECUTION_ERROR" in failed.messages[0]["content"]
        fenced = await step(episode, 'I take one.\n```json\n{"number": 1}\n```')
        assert not fenced.done
        thinking = await step(episode, '<think>{"number": 1}')
        assert "no JSON object" in thinking.messages[0]["content"]
        last = await step(episode, "<think>2</think>\n1")  # the schema has one required field
        assert last.done and last.reward == 1.0 and last.metrics == {"invalid": 1.0, "steps": 6.0}
        await episode.close()

    played(play)


def test_a_template_shows_the_observation(url: str) -> None:
    async def play() -> None:
        episode: Any = made(url, template="State {observation}; reply like {{}}").for_episode()
        [first] = await episode.reset({"start": 1}, 0)
        assert first["content"].startswith('State {"') and first["content"].endswith("reply like {{}}")
        await episode.close()

    played(play)


def test_more_episodes_than_sessions_wait(url: str) -> None:
    async def play() -> None:
        environment, running, most = made(url), 0, 0
        together = asyncio.Barrier(4)  # all of the server's sessions

        async def one(number: int) -> float:
            nonlocal running, most
            episode: Any = environment.for_episode()
            await episode.reset({"start": 1}, number)
            running, most = running + 1, max(most, running + 1)
            await together.wait()
            last = await step(episode, '{"number": 1}')
            running -= 1
            await episode.close()
            return last.reward

        assert await asyncio.gather(*map(one, range(12))) == [1.0] * 12
        assert most == 4

    played(play)


def test_a_lost_server_fails_the_episode_in_one_line() -> None:
    set_reachable_hosts("127.0.0.1")

    async def play() -> None:
        with server(1) as (address, process):
            episode: Any = made(address).for_episode()
            await episode.reset({"start": 3}, 0)
            process.kill()
            process.wait()
            with pytest.raises(SessionLost, match=r"the session at .* is lost"):
                await step(episode, '{"number": 1}')
            await episode.close()
            with pytest.raises(UserError, match="does not answer"):
                await episode.reset({"start": 3}, 0)

    played(play)
    set_reachable_hosts("127.0.0.1")


def test_a_private_address_is_refused_unless_it_is_allowed(url: str, tmp_path: Path) -> None:
    environment = {"id": "openenv", "url": url, "resets": [{"start": 1}] * 8, "template": "{observation}"}
    with served(tmp_path) as service, httpx.Client(
        base_url=service.url, headers={"Authorization": f"Bearer {service.key}"}, timeout=60
    ) as http:  # fmt: skip
        answer = http.post("/api/v1/jobs", json=job(environment=environment))
        assert answer.status_code == 422 and "ROOKERY_REACHABLE_HOSTS=127.0.0.1" in answer.text


def test_a_job_trains_on_a_server(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOKERY_REACHABLE_HOSTS", "127.0.0.1")
    environment = {"id": "openenv", "url": url, "resets": [{"start": 4}] * 8, "max_turns": 2}
    with served(tmp_path, reachable_hosts="127.0.0.1") as service, httpx.Client(
        base_url=service.url, headers={"Authorization": f"Bearer {service.key}"}, timeout=60
    ) as http:  # fmt: skip
        token = (service.settings.data / "worker.token").read_text(encoding="utf-8").strip()
        with ThreadedWorker(service.url, token, tokenizer(tmp_path)):
            submitted = http.post("/api/v1/jobs", json=job(environment=environment, sampling={"max_tokens": 8})).json()
            _, done = end_of(http, submitted["id"])
            assert done["state"] == "completed", done
