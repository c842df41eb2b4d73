"""Loads vLLM as a worker's engine, or reaches the server that the worker fronts, as the settings say."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from rookery.errors import UserError
from rookery.settings import Settings
from rookery.tokenization.chat import Chat
from rookery.worker import memory
from rookery.worker.engine.vllm.attached import Attached
from rookery.worker.engine.vllm.backend import Backend
from rookery.worker.engine.vllm.engine import VllmEngine
from rookery.worker.engine.vllm.in_process import InProcess
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.convert import published
from rookery.worker.model.decoder import WEIGHTS

log = logging.getLogger("rookery.engine")


def load_vllm(folder: Path, settings: Settings, dtype: str, cache_bytes: int | None) -> VllmEngine:
    """An engine for the base model in the prepared ``folder``. Raises ``UserError`` for a setting, a model or a server
    that cannot serve it, ``Unavailable`` for a server that does not answer."""
    backend: Backend
    if settings.engine.vllm_url:
        backend = Attached(settings)
    else:
        backend = InProcess(lambda: published(folder), settings, dtype, cache_bytes)
    try:
        projections = DecoderConfig.read(folder)
    except UserError:
        projections = None  # of a family that the native decoder does not know: vLLM checks adapters
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    engine = VllmEngine(
        backend,
        vocabulary,
        Chat.load(folder),
        projections,
        gap_alarm=settings.engine.engine_gap_alarm,
        gap_limit=settings.engine.engine_gap_limit,
    )
    log.info("vLLM serves %s: %s", folder.name, engine.limits)
    return engine


def cache_alone(folder: Path, device_type: str, used: int, total: int) -> int | None:
    """Bytes of the KV cache of a worker that does not train: what would be the trainer's, too. None on a GPU, whose
    memory vLLM divides."""
    if device_type == "cuda":
        return None
    budget = memory.divide(total, used + (folder / WEIGHTS).stat().st_size, device_type)
    return budget.kv_cache + budget.training_states + budget.activations
