"""The real SDK while the artifacts or the database are away for some seconds: operations wait and lose nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.storage.test_place import unmount
from tests.support.s3 import s3
from tests.support.storing import new_database, postgres_cluster
from tests.support.tinkered import ADAM, MODEL, PATIENCE, TOKENS, client, datum, running, steps, trainer
from tinker import types

from rookery.server.launcher import EmbeddedService

pytestmark = pytest.mark.heavy

SECONDS = 2.0
"""How long a place is away: some heartbeats."""

Leave = Callable[[], Callable[[], object]]
"""Takes a place away; returns the function that brings it back."""


@contextmanager
def folder(root: Path, name: str) -> Iterator[tuple[EmbeddedService, Leave]]:
    shared = root / name
    with running(root, f"{name}-data", artifacts_url=str(shared)) as service:
        yield service, lambda: unmount(shared)


@contextmanager
def bucket(root: Path, name: str) -> Iterator[tuple[EmbeddedService, Leave]]:
    with pytest.MonkeyPatch.context() as patch, s3() as server:
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(variable, "test")
        settings = {"artifacts_url": "s3://bucket/prefix", "artifacts_endpoint": server.endpoint}
        with running(root, f"{name}-data", store_retries=1, **settings) as service:

            def leave() -> Callable[[], object]:
                server.mode = "no bucket"
                return lambda: setattr(server, "mode", "ok")

            yield service, leave


@contextmanager
def database(root: Path, name: str) -> Iterator[tuple[EmbeddedService, Leave]]:
    with ExitStack() as opened:
        cluster = opened.enter_context(postgres_cluster())
        service = opened.enter_context(running(root, f"{name}-data", database=new_database(cluster.url)))

        def leave() -> Callable[[], object]:
            cluster.stop()
            return cluster.start

        yield service, leave


@contextmanager
def away(leave: Leave) -> Iterator[None]:
    """The place is away while the context is entered, and for some seconds then."""
    back = leave()
    timer = threading.Timer(SECONDS, back)
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.mark.parametrize("place", [folder, bucket, database])
def test_every_operation_waits_for_its_place(place: Any, root: Path) -> None:
    """A chat waits too, or is answered with a status that clients repeat."""
    with ExitStack() as opened:
        service, leave = opened.enter_context(place(root, place.__name__))
        visitor = client(service)
        expected = steps(trainer(visitor), 4)
        training = trainer(visitor)
        losses = steps(training, 1)
        start = training.save_state("start").result(PATIENCE).path
        with away(leave):
            losses += steps(training, 1)
        with away(leave):
            saved = training.save_state("second").result(PATIENCE).path
        with away(leave):
            training.load_state(start).result(PATIENCE)
        with away(leave):
            training.load_state_with_optimizer(saved).result(PATIENCE)
        losses += steps(training, 1)
        with away(leave):
            sampler = training.save_weights_and_get_sampling_client().result(PATIENCE)
        prompt, params = types.ModelInput.from_ints(TOKENS), types.SamplingParams(max_tokens=5, seed=1)
        before = [one.tokens for one in sampler.sample(prompt, 2, params).result(PATIENCE).sequences]
        with away(leave):
            final = training.save_weights_for_sampler("final").result(PATIENCE).path
            sampled = visitor.create_sampling_client(final).sample(prompt, 2, params).result(PATIENCE)
        assert [one.tokens for one in sampled.sequences] == before
        with away(leave):
            assert chat(service, final).status_code == 200
        with away(leave):
            second = visitor.create_lora_training_client(MODEL, rank=4, seed=2).result(PATIENCE)
        with away(leave):
            futures = [second.forward_backward([datum(TOKENS, [1.0] * 11)], "cross_entropy"), second.optim_step(ADAM)]
            assert all(future.result(PATIENCE) is not None for future in futures)
        losses += steps(training, 1)
        assert losses == pytest.approx(expected, rel=1e-4)


def chat(service: EmbeddedService, path: str) -> httpx.Response:
    """The answer of a client that heeds Retry-After."""
    headers = {"Authorization": f"Bearer {service.key}"}
    body = {"model": path, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    while True:
        response = httpx.post(f"{service.url}/v1/chat/completions", headers=headers, json=body, timeout=PATIENCE)
        if response.status_code != 503:
            return response
        time.sleep(int(response.headers["Retry-After"]))
