"""A real service with a real worker on the small random model, and the real Tinker SDK as its client."""

from __future__ import annotations

import logging
import os
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import httpx
import numpy as np
import tinker
from tests.support.rules import split
from tests.support.small_model import save_small_model
from tinker import types

from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings
from rookery.tokenization.registry import model_folder
from rookery.worker.model.convert import prepare

RANK = 4
PATIENCE = 180.0
TOKENS = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]
ADAM = types.AdamParams(learning_rate=0.02)


MODEL = "smollm2-360m-instruct"
"""A name of the catalogue, which every tenant may use; in the tests' cache the small model has its place."""


def place_model(root: Path) -> None:
    """The small model, prepared in ``root/cache``; ``root/small`` is its source."""
    prepared = prepare(str(save_small_model(root / "small")), root / "cache")
    prepared.rename(model_folder(root / "cache", MODEL))


@contextmanager
def running(root: Path, data: str = "data", port: int = 0, **more: Any) -> Iterator[EmbeddedService]:
    """A service with one worker process of one thread on the model of :func:`place_model`."""
    more, rules = split(more)
    given: dict[str, Any] = {
        "models": str(root / "small"),
        "workers": 1,
        "heartbeat_seconds": 0.5,
        "threads": 1,
        **more,
    }
    settings = Settings.load({}, data=root / data, cache=root / "cache", port=port, flush_seconds=0.02, **given)
    with EmbeddedService(settings, rules) as service:
        yield service


# A client of the SDK outlives the service of its test and says so: in the logs of later tests of this process, and at
# last behind pytest's closing line.
logging.getLogger("tinker").addHandler(logging.NullHandler())
logging.getLogger("tinker").propagate = False


def client(service: EmbeddedService, key: str | None = None, url: str | None = None) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=url or f"{service.url}/tinker", api_key=key or service.key)


def new_key(service: EmbeddedService, name: str) -> str:
    """A key of a new tenant."""
    headers = {"Authorization": f"Bearer {service.key}"}
    with httpx.Client(base_url=service.url, headers=headers, timeout=60) as http:
        tenant = http.post("/api/v1/tenants", json={"name": name}).raise_for_status().json()["id"]
        return str(http.post(f"/api/v1/tenants/{tenant}/keys", json={}).raise_for_status().json()["key"])


def trainer(visitor: tinker.ServiceClient, **more: Any) -> tinker.TrainingClient:
    return visitor.create_lora_training_client(MODEL, rank=RANK, seed=1, **more).result(PATIENCE)


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


class DroppingProxy:
    """Forwards HTTP requests to a service; the first reply to each kind of call is lost after the call was carried out,
    with the connection. ``seen`` counts calls by path."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._server: socketserver.ThreadingTCPServer | None = None
        self.seen: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()

    def __enter__(self) -> DroppingProxy:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "content-length")}
                reply = httpx.request(
                    self.command, proxy._target + self.path, content=body, headers=headers, timeout=60
                )
                kind = self.path.rsplit("/", 1)[-1]
                proxy.seen[kind] += 1
                if kind != "retrieve_future" and not proxy.dropped[kind]:
                    proxy.dropped[kind] += 1
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                self.send_response(reply.status_code)
                self.send_header("content-type", reply.headers.get("content-type", "application/json"))
                self.send_header("content-length", str(len(reply.content)))
                self.end_headers()
                self.wfile.write(reply.content)

            do_GET = do_PUT = do_DELETE = do_POST  # noqa: N815

            def log_message(self, format: str, *arguments: Any) -> None:
                return

        socketserver.ThreadingTCPServer.daemon_threads = True
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *ended: object) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"


def steps(training: tinker.TrainingClient, count: int) -> list[float]:
    """Training on one text; the losses."""
    losses = []
    for _ in range(count):
        forward = training.forward_backward([datum(TOKENS, [1.0] * 11)], "cross_entropy")
        step = training.optim_step(ADAM)
        losses.append(forward.result(PATIENCE).metrics["loss:sum"])
        assert step.result(PATIENCE).metrics is not None
    return losses
