"""Loads vLLM as a worker's engine, or reaches the server that the worker fronts, as the settings say."""

from __future__ import annotations

import json
import logging
from contextlib import closing, suppress
from pathlib import Path

import torch

from rookery import protocol
from rookery.errors import UserError
from rookery.settings import Settings
from rookery.tokenization.chat import Chat
from rookery.tokenization.registry import WEIGHTS, config_path, recorded_projections
from rookery.worker import memory
from rookery.worker.engine.vllm.attached import Attached
from rookery.worker.engine.vllm.backend import Backend, ServerFault
from rookery.worker.engine.vllm.engine import VllmEngine
from rookery.worker.engine.vllm.in_process import InProcess
from rookery.worker.model.adapter import Adapter, Projections, write_adapter
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.published import published
from rookery.worker.transfer.cache import ADAPTERS, PrivateFolder

log = logging.getLogger("rookery.engine")

GAP_ALARM_NATS = 0.1
"""Mean difference per token between the log-probabilities of vLLM and of the trainer on a version's canary text above
which a worker logs a warning: twice what bfloat16 alone makes (``engine_gap_limit`` refuses the version)."""


def load_vllm(folder: Path, settings: Settings, dtype: str, cache_bytes: int | None) -> VllmEngine:
    """An engine for the base model in the prepared ``folder``. Raises ``UserError`` for a setting, a model or a server
    that cannot serve it, ``Unavailable`` for a server that does not answer."""
    backend: Backend
    if settings.engine.vllm_url:
        backend = Attached(settings)
    else:
        backend = InProcess(lambda: published(folder), settings, dtype, cache_bytes)
    from transformers import AutoConfig  # takes half a second, which other workers need not spend

    native = None
    with suppress(UserError):  # of a family that the native decoder does not know
        native = DecoderConfig.read(folder)
    config = AutoConfig.for_model(**json.loads(config_path(folder).read_text(encoding="utf-8")))
    text = config.get_text_config(decoder=True)  # nested where a model also reads images
    engine = VllmEngine(
        backend,
        text.vocab_size,
        text.max_position_embeddings,
        Chat.load(folder),
        native or recorded_projections(folder),
        gap_alarm=GAP_ALARM_NATS,
        gap_limit=settings.engine.engine_gap_limit,
    )
    if settings.engine.vllm_url and native is not None:
        _probe_rank(engine, native, settings)
    log.info("vLLM serves %s: %s", folder.name, engine.limits)
    return engine


def _probe_rank(engine: VllmEngine, projections: Projections, settings: Settings) -> None:
    """Load an adapter of the highest rank, which changes nothing, as the server will have to. Raises ``UserError``
    where it cannot: its limit is lower, or it does not see the worker's files."""
    rank, cache = settings.engine.max_rank, settings.cache / ADAPTERS
    where, (inputs, outputs) = next(iter(projections.shapes.items()))
    weights = {where: (torch.zeros(rank, inputs), torch.zeros(outputs, rank))}
    ref = protocol.AdapterRef(policy="rookery-probe", version=0, hash="probe", rank=rank, alpha=float(rank))
    with closing(PrivateFolder(cache)) as private:
        write_adapter(private.path, Adapter(rank, ref.alpha, weights, prefix=projections.prefix))
        try:
            engine.add_adapter(ref, private.path)
        except (UserError, ServerFault) as error:  # a rank above its limit is a server's fault to vLLM
            raise UserError(
                f"{error}; start it with --max-lora-rank {rank}, or this worker with a lower ROOKERY_MAX_RANK, and let"
                f" it read {settings.cache}"
            ) from None
        engine.evict_adapter(ref.hash)


def cache_alone(folder: Path, device_type: str, used: int, total: int) -> int | None:
    """Bytes of the KV cache of a worker that does not train: what would be the trainer's, too. None on a GPU, whose
    memory vLLM divides."""
    if device_type == "cuda":
        return None
    budget = memory.divide(total, used + (folder / WEIGHTS).stat().st_size, device_type)
    return budget.kv_cache + budget.training_states + budget.activations
