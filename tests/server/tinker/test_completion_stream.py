"""The stream of a sampler's completed requests (``retrieve_futures``)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from tests.support.driven import Client
from tests.support.peers import Service
from tests.support.tinkered import MODEL, PATIENCE, client, free_port, place_model, running
from tinker import types

from rookery.controller.sessions import operations
from rookery.controller.sessions.futures import CLONE_REQUESTS
from rookery.errors import NotFound

PROMPT = types.ModelInput.from_ints([72, 101, 108, 108, 111])


async def completed(visitor: Client, sampler: str, cursor: int, wanted: int, clone: int = 0) -> tuple[list[str], int]:
    """Ids of ended requests, as many as wanted, in the order in which they were told, and the cursor behind them."""
    found: list[str] = []
    async with asyncio.timeout(PATIENCE):
        while len(found) < wanted:
            events, cursor = await visitor.poll(sampler, clone, cursor, 5.0)
            assert all(not event.failed and event.size > 0 for event in events)
            found += [event.request for event in events]
    return found, cursor


async def test_every_completed_request_is_reported_and_again_after_a_restart(tmp_path: Path) -> None:
    service = Service(tmp_path, session_poll_seconds=0.05)
    await service.start()
    await service.worker().join()
    visitor = await Client(service).begin()
    sampler = await visitor.sampler(None)
    early = [await visitor.sample(sampler, number) for number in range(3)]
    for request in early:
        await visitor.outcome(request)  # over before anybody asks
    first, cursor = await completed(visitor, sampler, 0, 3)
    assert sorted(first) == sorted(early) and cursor > 0
    assert await completed(visitor, sampler, 0, 3) == (first, cursor), "the answer was lost: it is told again"
    assert await visitor.poll(sampler, 0, cursor, 0.0) == ([], cursor)
    asked = asyncio.ensure_future(completed(visitor, sampler, cursor, 2))
    copy = await visitor.sample(sampler, 7 * CLONE_REQUESTS)
    late = [await visitor.sample(sampler, number) for number in (3, 4)]
    second, onward = await asked
    assert second == sorted(late) and onward == cursor + 2
    assert (await completed(visitor, sampler, 0, 1, clone=7))[0] == [copy]
    with pytest.raises(NotFound):
        await Client(service, "bob").poll(sampler, 0, 0, 0.0)
    await service.crash()
    service.clock.now += 0.001
    await service.start()
    await service.worker().join()
    third = await visitor.sample(sampler, 5)
    await visitor.outcome(third)
    again, final = await completed(visitor, sampler, onward, 6)
    assert sorted(again) == sorted([*early, *late, third])
    assert await visitor.poll(sampler, 0, final, 0.0) == ([], final)
    await service.close()


async def test_failed_request_is_reported_as_failed_and_idle_streams_are_dropped(tmp_path: Path) -> None:
    service = Service(tmp_path, session_poll_seconds=0.05, session_idle_seconds=30.0)
    await service.start()
    worker = await service.worker().join()
    visitor = await Client(service).begin()
    sampler = await visitor.sampler(None)
    worker.generating.clear()
    request = await visitor.sample(sampler, 0)
    await visitor.sessions.samplers.cancel("alice", request)
    events, cursor = await visitor.poll(sampler, 0, 0, None)
    assert [(event.request, event.failed) for event in events] == [(request, True)]
    assert isinstance(await visitor.outcome(request), operations.OperationFailed)
    streams = visitor.sessions.futures.completions
    assert len(streams) == 1
    service.clock.now += 31.0
    await visitor.sessions.sweep()
    assert len(streams) == 0
    events, later = await visitor.poll(sampler, 0, cursor, 0.0)
    assert [event.request for event in events] == [request] and later > cursor
    await service.close()


def test_sdk_follows_its_samples_by_the_stream_across_a_restart(tmp_path: Path) -> None:
    place_model(tmp_path)
    port = free_port()

    def sample(count: int, first: int, max_tokens: int) -> list:  # type: ignore[type-arg]
        params = [
            types.SamplingParams(max_tokens=max_tokens, seed=seed, stop=[]) for seed in range(first, first + count)
        ]
        return [sampler.sample(PROMPT, 1, given) for given in params]

    with running(tmp_path, "feed", port) as service:
        visitor = client(service)
        holder = visitor.holder
        config = holder.get_client_config().model_copy(update={"sample_use_retrieve_futures": True})
        holder._client_config = config
        sampler = visitor.create_sampling_client(base_model=MODEL).result(PATIENCE)
        asked = {"target": {"sampling_session_id": sampler._sampling_session_id}, "timeout": 0}
        done = [future.result(PATIENCE).sequences[0].tokens for future in sample(24, 0, 6)]
        assert sampler._futures_poller is not None, "the client uses the stream"
        with httpx.Client(base_url=f"{service.url}/tinker/api/v1", headers={"X-API-Key": service.key}) as http:
            body = http.post("/retrieve_futures", json=asked).raise_for_status().json()
            assert len(body["completions"]) <= 24 and body["cursor"] > 0
            wrong = {"target": {"sampling_session_id": "nobody"}}
            assert http.post("/retrieve_futures", json=wrong).status_code == 404
        open_ones = sample(12, 0, 400)
    with running(tmp_path, "feed", port):
        texts = [future.result(PATIENCE).sequences[0].tokens for future in open_ones]
        assert [text[:6] for text in texts] == done[:12]
        assert [future.result(PATIENCE).sequences[0].tokens for future in sample(24, 0, 6)] == done
