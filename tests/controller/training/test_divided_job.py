"""A job whose batches two training workers share, with a real service and workers: either of them is killed in the
middle of a step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.chaos.driver import wait_until
from tests.support.small_model import save_small_model

from rookery import Client, Job
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings

WORKER = """
import pathlib, sys, time
from rookery.worker.process import main
from rookery.worker.trainer.packed_trainer import PackedTrainer
forward = PackedTrainer.forward_backward
def doomed(self, op, *arguments):
    if op.parent.version == 1 and pathlib.Path({doom!r}).exists():
        print("a share" if op.upload else "the policy", flush=True)
        time.sleep(600)
    forward(self, op, *arguments)
PackedTrainer.forward_backward = doomed
sys.exit(main(sys.argv[1:]))
"""
"""A policy's second step begins, and does not end before the worker is killed, once the file ``doom`` exists."""

STEPS = 3
TOLERANCE = 0.01
"""Of the repeated step's largest change: a worker computes in bfloat16, and a share's products have other shapes."""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[EmbeddedService]:
    folders = {"data": tmp_path / "data", "cache": tmp_path / "cache"}
    with EmbeddedService(Settings.load({}, port=0, models="", workers=0, **folders)) as running:
        yield running


@pytest.fixture
def start(service: EmbeddedService, tmp_path: Path) -> Iterator[Start]:
    """Starts a worker; all of them are killed afterwards."""
    token = (tmp_path / "data" / "worker.token").read_text().strip()
    environment = {**os.environ, "ROOKERY_TOKEN": token, "ROOKERY_CACHE": str(tmp_path / "cache")}
    environment |= {"ROOKERY_THREADS": "1"}
    model = save_small_model(tmp_path / "model")
    with ExitStack() as stack:

        def begin(name: str, roles: str) -> subprocess.Popen[str]:
            code = WORKER.format(doom=str(tmp_path / f"doom of {name}"))
            command = [sys.executable, "-c", code, "--connect", service.url, "--model", str(model)]
            process = subprocess.Popen(
                [*command, "--name", name, "--roles", roles], env=environment, stdout=subprocess.PIPE, text=True
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield begin


def train(client: Client, model: Path, started: subprocess.Popen[str] | None = None) -> tuple[Job, str]:
    """A job that is over, and where ``started`` was killed, if it was."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
    optimizer = {"lr": 1e-2, "eps": 1e-3}  # a small gradient entry, which is its rounding, makes a small step
    spec: dict[str, Any] = {
        "name": "divided",
        "base_model": str(model),
        "environment": {"id": "jsonl", "rows": rows, "verifier": {"name": "regex", "pattern": "[a-f0-9]"}},
        "policies": {"main": {"rank": 4, "trainers": 2, "optimizer": optimizer}},
        "algorithm": {"group_size": 4, "groups_per_step": 4},
        "sampling": {"max_tokens": 16},
        "stop": {"steps": STEPS},
        "checkpoints": {"keep_last": STEPS + 1},
    }
    job = client.submit(spec)
    killed_at = ""
    if started is not None:
        assert started.stdout is not None
        killed_at = started.stdout.readline().strip()
        started.kill()
    assert job.wait(120).reason == f"{STEPS} steps"
    assert [(version.version, version.step) for version in job.versions()] == [(n, n) for n in range(STEPS + 1)]
    assert [row["step"] for row in job.metrics(follow=False)] == list(range(1, STEPS + 1))
    return job, killed_at


def texts(job: Job, steps: int) -> list[tuple[int, str]]:
    """Of the episodes of the first steps."""
    found = ((episode.ordinal, str(episode.messages)) for episode in job.trajectories(limit=1000))
    return sorted(text for text in found if text[0] < 4 * steps)


def weights(job: Job, version: int, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(job.adapter(version).download(folder / f"{job.id}-{version}") / "adapter_model.safetensors")


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_step_whose_trainer_is_killed_is_repeated_from_its_last_commit(
    service: EmbeddedService, start: Start, tmp_path: Path
) -> None:
    """Three real workers start one after another. Until its second step a disturbed job equals the undisturbed one bit
    for bit, and with that step up to the order of sums."""
    with Client(service.url, service.key) as client:

        def join(name: str, roles: str, count: int) -> subprocess.Popen[str]:
            worker = start(name, roles)
            wait_until(lambda: [row.state for row in client.workers()].count("serving") == count, f"{name} serves")
            return worker

        join("m", "rollout,train", 1)
        victim = join("a", "train", 2)
        whole, _ = train(client, tmp_path / "model")
        for name in "az":
            (tmp_path / f"doom of {name}").touch()
        for where in ("the policy", "a share"):
            job, killed_at = train(client, tmp_path / "model", victim)
            assert killed_at == where
            assert texts(job, 2) == texts(whole, 2) and len(texts(job, 2)) == 32
            before, expected = (weights(whole, version, tmp_path) for version in (1, 2))
            assert all(torch.equal(weight, before[name]) for name, weight in weights(job, 1, tmp_path).items())
            largest = max(float((expected[name] - weight).abs().max()) for name, weight in before.items())
            for name, weight in weights(job, 2, tmp_path).items():
                torch.testing.assert_close(weight, expected[name], rtol=0, atol=TOLERANCE * largest)
            if where == "the policy":
                victim = join("z", "train", 2)
