"""The promises of the Tinker API under faults: order, retries, restarts, and more clients than places."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from tests.support.ports import free_port
from tests.support.tinkered import (
    ADAM,
    MODEL,
    PATIENCE,
    TOKENS,
    DroppingProxy,
    client,
    datum,
    logprobs,
    new_key,
    running,
    steps,
    trainer,
)
from tests.support.waiting import until
from tinker import types

from rookery.server.launcher import EmbeddedService

pytestmark = pytest.mark.heavy

CLIENTS, SLOTS = 8, 2


@pytest.fixture(scope="module")
def expected(service: EmbeddedService) -> list[float]:
    """The losses of four steps that nothing disturbs."""
    return steps(trainer(client(service)), 4)


def test_chunks_out_of_order_and_lost_replies_give_the_same_losses(service: EmbeddedService) -> None:
    """A batch of three chunks, whose first is sent last, through a proxy that loses the first reply of every kind; the
    losses are those of a client with nothing in between."""
    draw = np.random.default_rng(0)
    data = [datum(draw.integers(0, 250, 3).tolist(), [1.0, 0.5]) for _ in range(20)]
    results = []
    with DroppingProxy(service.url) as proxy:
        for url in (None, f"{proxy.url}/tinker"):
            visitor = client(service, url=url)
            config = visitor.holder.get_client_config()
            visitor.holder._client_config = config.model_copy(update={"fwdbwd_max_chunk_len": 8})
            training = trainer(visitor)
            output = training.forward_backward(data, "cross_entropy")
            step = training.optim_step(ADAM)
            found = output.result(PATIENCE)
            metrics = step.result(PATIENCE).metrics
            assert metrics is not None
            assert len(found.loss_fn_outputs) == 20
            sampler = training.save_weights_and_get_sampling_client().result(PATIENCE)
            sampled = sampler.sample(
                types.ModelInput.from_ints(TOKENS), 2, types.SamplingParams(max_tokens=5, seed=1)
            ).result(PATIENCE)
            scored = logprobs(training.forward(data[:5], "cross_entropy").result(PATIENCE))
            results.append((found, metrics["grad_norm"], [s.tokens for s in sampled.sequences], scored))
            rest = tinker.RestClient(base_url=f"{service.url}/tinker", api_key=service.key)
            assert len(rest.get_session(visitor.holder.get_session_id()).result(PATIENCE).training_run_ids) == 1
    (one, norm, text, after), (other, norm_too, text_too, after_too) = results
    assert one.metrics["loss:sum"] == pytest.approx(other.metrics["loss:sum"], rel=1e-5)
    assert norm == pytest.approx(norm_too, rel=1e-5)
    assert text == text_too
    np.testing.assert_allclose(np.stack(after), np.stack(after_too), atol=1e-5)
    assert {"create_session", "create_model", "forward_backward", "optim_step", "asample"} <= proxy.dropped.keys()
    assert proxy.seen["forward_backward"] == 3 + 1 + 1


def test_restart_during_open_futures_and_a_gradient(root: Path, expected: list[float]) -> None:
    port = free_port()
    long = [datum([*range(200)], [0.0] * 199) for _ in range(24)]
    with running(root, "restart", port) as service:
        key = service.key
        visitor = client(service)
        training = trainer(visitor)
        losses = steps(training, 2)
        first = training.forward_backward([datum(TOKENS, [1.0] * 11)], "cross_entropy").result(PATIENCE)
        second = training.forward_backward(long, "cross_entropy")  # nothing for the gradient, but time to be computed
        step = training.optim_step(ADAM)
        sampler = training.save_weights_for_sampler("middle")
        until(lambda: open_requests(root / "restart") >= 2, pause=0.005)
    with running(root, "restart", port) as service:
        assert service.key == key
        assert second.result(PATIENCE).metrics["loss:sum"] == 0.0
        assert step.result(PATIENCE).metrics is not None
        losses += [first.metrics["loss:sum"], *steps(training, 1)]
        assert losses == pytest.approx(expected, rel=1e-4)
        path = sampler.result(PATIENCE).path
        answer = visitor.create_sampling_client(path).result(PATIENCE)
        assert answer.sample(types.ModelInput.from_ints(TOKENS), 1, types.SamplingParams(max_tokens=3)).result(PATIENCE)


def test_worker_killed_during_a_gradient_changes_no_loss(service: EmbeddedService, expected: list[float]) -> None:
    training = trainer(client(service))
    losses = steps(training, 2)
    first = training.forward_backward([datum(TOKENS, [1.0] * 11)], "cross_entropy").result(PATIENCE)
    headers = {"Authorization": f"Bearer {service.key}"}
    workers = httpx.get(f"{service.url}/api/v1/workers", headers=headers, timeout=60).json()
    for worker in workers:
        if worker["state"] == "serving":
            os.kill(worker["pid"], signal.SIGKILL)
    assert training.optim_step(ADAM).result(PATIENCE).metrics is not None
    losses += [first.metrics["loss:sum"], *steps(training, 1)]
    assert losses == pytest.approx(expected, rel=1e-4)


def open_requests(data: Path) -> int:
    with sqlite3.connect(f"file:{data / 'rookery.db'}?mode=ro", uri=True) as database:
        return int(database.execute("select count(*) from futures where outcome is null").fetchone()[0])


def test_more_clients_than_slots_all_make_progress(root: Path) -> None:
    """Clients of two tenants, all at once, on a worker with slots for a quarter of them. States without a slot stay in
    main memory."""
    losses, pulls = crowd(root, "memory")
    assert np.all(losses[:, 1] != losses[:, 0])
    assert pulls < CLIENTS - SLOTS


def crowd(root: Path, data: str, **more: Any) -> tuple[np.ndarray, int]:
    """Losses [client, step], and how often the worker pulled a training state."""
    settings: dict[str, Any] = {"trainer_slots": SLOTS, "session_slot_wait": 0.5, "session_poll": 0.05}
    with running(root, data, **settings, **more) as service:
        other = new_key(service, "other")
        queued: set[str] = set()
        seen = threading.Lock()

        def work(number: int) -> list[float]:
            visitor = client(service, other if number % 2 else None)
            training = visitor.create_lora_training_client(MODEL, rank=4, seed=number).result(PATIENCE)

            def told(state: object, reason: str | None) -> None:
                if reason:
                    with seen:
                        queued.add(reason)

            training._queue_state_logger.on_queue_state_change = told  # type: ignore[method-assign]
            return steps(training, 2)

        with ThreadPoolExecutor(CLIENTS) as pool:
            losses = list(pool.map(work, range(CLIENTS)))
        assert any(f"({SLOTS}) are in use; " in reason and "before this one" in reason for reason in queued)
    logs = [path.read_text() for path in (root / data / "logs").glob(f"worker-{MODEL}*.log")]
    return np.array(losses), sum(log.count("pulled trainer_state.safetensors") for log in logs)


def test_two_tenants_with_the_same_names_share_nothing(service: EmbeddedService) -> None:
    keys = [new_key(service, name) for name in ("ada", "bob")]
    paths, sessions = [], []
    for key in keys:
        visitor = client(service, key)
        training = trainer(visitor)
        steps(training, 1 + len(paths))
        paths.append(training.save_state("same").result(PATIENCE).path)
        training.save_weights_for_sampler("same").result(PATIENCE)
        sessions.append((visitor, training))
    assert paths[0] != paths[1]
    for key, mine, theirs, (visitor, training) in zip(keys, paths, paths[::-1], sessions, strict=True):
        rest = tinker.RestClient(base_url=f"{service.url}/tinker", api_key=key)
        shown = [c.tinker_path for c in rest.list_user_checkpoints().result(PATIENCE).checkpoints]
        assert mine in shown and theirs not in shown and len(shown) == 2
        runs = rest.list_training_runs().result(PATIENCE).training_runs
        assert [run.training_run_id for run in runs] == [training.model_id]
        assert rest.list_sessions().result(PATIENCE).sessions == [visitor.holder.get_session_id()]
        with pytest.raises(tinker.NotFoundError):
            rest.get_weights_info_by_tinker_path(theirs).result(PATIENCE)
        with pytest.raises(tinker.NotFoundError):
            rest.delete_checkpoint_from_tinker_path(theirs).result(PATIENCE)
        with pytest.raises(tinker.NotFoundError):
            visitor.create_training_client_from_state(theirs).result(PATIENCE)
        with pytest.raises(tinker.NotFoundError):
            visitor.create_sampling_client(theirs).result(PATIENCE)
    others(service, keys[1], sessions[0][1].model_id)
    with pytest.raises(tinker.AuthenticationError):
        client(service, "tml-nobody").create_sampling_client(base_model=MODEL).result(PATIENCE)


def others(service: EmbeddedService, key: str, model: str) -> None:
    """Another tenant's model and request answer as ones that never were."""
    with httpx.Client(base_url=f"{service.url}/tinker/api/v1", headers={"X-API-Key": key}, timeout=60) as http:
        for path, body in [
            ("get_info", {"model_id": "MODEL"}),
            ("optim_step", {"model_id": "MODEL", "seq_id": 9, "adam_params": {}}),
            ("save_weights", {"model_id": "MODEL", "seq_id": 9, "path": "x"}),
            ("retrieve_future", {"request_id": "MODEL/1"}),
        ]:
            answers = []
            for name in (model, f"session-{'0' * 24}:train:0"):
                given = {field: value.replace("MODEL", name) if isinstance(value, str) else value
                         for field, value in body.items()}  # fmt: skip
                reply = http.post(f"/{path}", json=given)
                answers.append((reply.status_code, reply.text.replace(name, "MODEL")))
            assert answers[0] == answers[1]
            assert answers[0][0] in (404, 410)
