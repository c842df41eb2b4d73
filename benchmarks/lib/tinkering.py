"""A Rookery service as a Tinker client meets it, for measures that go through that API."""

from __future__ import annotations

import os

os.environ["TINKER_TELEMETRY"] = "0"  # before the package is there: it would look for its own service

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lib.harness import MODEL
from tinker import types

from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings


@contextmanager
def tinkering(**settings: Any) -> Iterator[EmbeddedService]:
    """A service with one worker, in a folder that goes when it ends. Calls wait for the worker by themselves."""
    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"port": 0, "models": MODEL, "log_level": "WARNING"} | settings
        with EmbeddedService(Settings.load(data=Path(folder), **given)) as embedded:
            yield embedded


def datum(prompt: Sequence[int], text: Sequence[int], weight: float = 1.0) -> types.Datum:
    """``text`` is predicted from ``prompt`` and itself."""
    whole = [*prompt, *text]
    weights = [0.0] * (len(prompt) - 1) + [weight] * len(text)
    return types.Datum(
        model_input=types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=whole[1:], dtype="int64", shape=[len(whole) - 1]),
            "weights": types.TensorData(data=weights, dtype="float32", shape=[len(whole) - 1]),
        },
    )
