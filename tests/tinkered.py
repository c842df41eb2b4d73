"""A real service with a real worker on the small random model, and the real Tinker SDK as its client."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import httpx
import numpy as np
import tinker
from tinker import types

from rookery.service.embedded import Embedded
from rookery.settings import Settings
from rookery.worker.model.prepare import prepare
from small_model import save_small_model

RANK = 4
PATIENCE = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def folder_model(root: Path) -> str:
    """The small model, prepared in ``root/cache``; its name is its folder."""
    name = str(save_small_model(root / "small"))
    prepare(name, root / "cache")
    return name


@contextmanager
def running(root: Path, data: str = "data", port: int = 0, **more: Any) -> Iterator[Embedded]:
    """A service with one worker process of one thread on the model of :func:`folder_model`."""
    given: dict[str, Any] = {
        "models": str(root / "small"),
        "workers": 1,
        "heartbeat_seconds": 0.5,
        "threads": 1,
        **more,
    }
    settings = Settings.load({}, data=root / data, cache=root / "cache", port=port, flush_seconds=0.02, **given)
    with Embedded(settings) as service:
        yield service


def client(service: Embedded, key: str | None = None, url: str | None = None) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url or f"{service.url}/tinker", api_key=key or service.key)


def new_key(service: Embedded, name: str) -> str:
    """A key of a new tenant."""
    headers = {"Authorization": f"Bearer {service.key}"}
    with httpx.Client(base_url=service.url, headers=headers) as http:
        tenant = http.post("/api/v1/tenants", json={"name": name}).raise_for_status().json()["id"]
        return str(http.post(f"/api/v1/tenants/{tenant}/keys", json={}).raise_for_status().json()["key"])


def trainer(visitor: tinker.ServiceClient, model: str, **more: Any) -> tinker.TrainingClient:
    return visitor.create_lora_training_client(model, rank=RANK, seed=1, **more).result(PATIENCE)


def datum(tokens: Sequence[int], weights: Sequence[float] | None = None, **inputs: Sequence[float]) -> types.Datum:
    """Each token but the last predicts the next one. ``inputs`` are float tensors."""
    given: dict[str, Any] = {"target_tokens": np.array(tokens[1:], np.int64)}
    if weights is not None:
        given["weights"] = np.array(weights, np.float32)
    given |= {name: np.array(values, np.float32) for name, values in inputs.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in given.items()},
    )


def logprobs(output: types.ForwardBackwardOutput) -> list[np.ndarray]:
    return [found["logprobs"].to_numpy() for found in output.loss_fn_outputs]
