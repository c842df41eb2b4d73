"""Engine, trainer and base model of a worker: the calls that need more than one of them, and how they are loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rookery import protocol
from rookery.settings import Settings
from rookery.tokenization.chat import Chat
from rookery.worker import device, memory
from rookery.worker.engine.base import Engine
from rookery.worker.engine.native.drafts import Speculator
from rookery.worker.engine.native.engine import PREFILL_TOKENS, NativeEngine
from rookery.worker.engine.native.runner import best_runner
from rookery.worker.engine.native.slo_gate import SloGate, measure_costs
from rookery.worker.engine.vllm.loading import cache_alone, load_vllm
from rookery.worker.memory import MemoryBudget, MemoryUse
from rookery.worker.model.batch_invariance import disable_amx_if_unsafe
from rookery.worker.model.canary import canary_tokens
from rookery.worker.model.config import SITES, DecoderConfig
from rookery.worker.model.decoder import WEIGHTS, Decoder, best_dtype
from rookery.worker.model.lora import LoraManager
from rookery.worker.trainer.base import Trainer
from rookery.worker.trainer.fsdp.trainer import FsdpTrainer
from rookery.worker.trainer.idle import IdleTrainer
from rookery.worker.trainer.native.backbone import limits_for
from rookery.worker.trainer.native.trainer import NativeTrainer
from rookery.worker.trainer.router import TrainerRouter
from rookery.worker.transfer.cache import ADAPTERS

if TYPE_CHECKING:
    from rookery.worker.trainer.fsdp.group import TrainingGroup

log = logging.getLogger("rookery.worker")


class WorkerCore:
    """Engine, trainer and base model of a worker."""

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        budget: MemoryBudget | None = None,
        *,
        gate: SloGate | None = None,
        device_name: str = "",
        dtype: str = "",
    ) -> None:
        """``gate``: the engine's, if it has one."""
        self.engine = engine
        self.trainer = trainer
        self.budget = budget
        self.gate = gate or SloGate(enabled=False)
        self.device_name = device_name
        self.dtype = dtype

    def memory(self) -> dict[str, MemoryUse]:
        """Use of each part of the memory budget."""
        parts = self.engine.memory() | self.trainer.memory()
        if self.budget is not None:
            parts["base"] = MemoryUse(self.budget.base, self.budget.base)
        return parts

    def submit(self, generate: protocol.Generate, folder: Path | None, arrived: float) -> bool:
        """Submit a request to the engine; False if its adapter is neither in memory nor in ``folder``. ``arrived``:
        when the worker got it, in monotonic seconds. Raises the engine's error for an impossible request, ``NoRoom``
        while adapters in use leave no room for its own."""
        if generate.adapter is not None and not self._ensure_resident(generate.adapter, folder):
            return False
        self.engine.submit(generate)
        self.gate.set_arrival(generate.request, arrived)
        return True

    def switch(self, request: str, ref: protocol.AdapterRef, folder: Path | None, *, recompute: bool) -> bool:
        """Continue a request with ``ref``; False if that is neither in memory nor in ``folder``. A request that has
        ended does not change. Raises ``NoRoom`` as :meth:`submit`."""
        if not self._ensure_resident(ref, folder):
            return False
        self.engine.switch_adapter(request, ref, recompute=recompute)
        return True

    def discard(self, *digests: str) -> None:
        """Nothing will name these versions again: evict their adapters and their offloaded training states."""
        for digest in digests:
            self.engine.evict_adapter(digest)
            self.trainer.discard_offloaded(digest)

    def _ensure_resident(self, ref: protocol.AdapterRef, folder: Path | None) -> bool:
        """Whether the adapter is in memory, read from ``folder`` if needed."""
        if folder is not None:
            self.engine.add_adapter(ref, folder)
        return self.engine.has_adapter(ref.hash)


@dataclass(frozen=True)
class _Place:
    """Where engine and trainer are loaded, and their shares of the memory."""

    folder: Path
    settings: Settings
    model: str
    device: torch.device
    budget: MemoryBudget
    gate: SloGate

    @property
    def slice_tokens(self) -> int:
        training = self.settings.training
        return training.gpu_slice_tokens if self.device.type == "cuda" else training.slice_tokens


def load_core(folder: Path, settings: Settings, model: str, *, trains: bool = True) -> WorkerCore:
    """With the base model of ``folder``; ``model`` is its name in exported adapters. A vLLM worker that does not train
    loads the model in vLLM only. Raises ``UserError`` if it does not fit the memory budget."""
    where = device.choose(settings.worker.device)
    total, before = memory.total_bytes(settings, where), device.used_bytes(where)
    vllm = settings.engine.inference_engine == "vllm"
    if vllm and not trains:
        dtype = str(best_dtype()).removeprefix("torch.")
        cache = None if settings.engine.vllm_url else cache_alone(folder, where.type, before, total)
        return WorkerCore(load_vllm(folder, settings, dtype, cache), IdleTrainer(), device_name=str(where), dtype=dtype)
    if where.type == "cpu" and not _use_amx(DecoderConfig.read(folder), settings.engine.max_rank):
        log.warning(
            "AMX is off: with %d threads and ranks up to %d, texts of this model would depend on their batch",
            torch.get_num_threads(),
            settings.engine.max_rank,
        )
    decoder = Decoder.load(folder, device=where, pack=settings.engine.pack_weights)
    mapped = (folder / WEIGHTS).stat().st_size  # on a CPU not all of it is in memory yet
    budget = memory.divide(total, max(device.used_bytes(where), before + mapped), where.type)
    gate = SloGate(enabled=settings.engine.slo_gate, headroom=settings.engine.kv_headroom)
    place = _Place(folder, settings, model, where, budget, gate)
    dtype = str(decoder.dtype).removeprefix("torch.")
    engine: Engine = (
        load_vllm(folder, settings, dtype, budget.kv_cache if where.type == "cpu" else None)
        if vllm
        else _native_engine(place, decoder)
    )
    trainer = _native_trainer(place, decoder)
    return WorkerCore(engine, trainer, budget, gate=gate, device_name=str(where), dtype=dtype)


def _native_engine(place: _Place, decoder: Decoder) -> NativeEngine:
    settings, budget = place.settings, place.budget
    bank = LoraManager(decoder.config, decoder.dtype, decoder.device, settings.engine.max_rank, budget.adapters)
    compiled = settings.engine.cpu_kernels
    engine = NativeEngine(
        decoder,
        bank,
        Chat.load(place.folder).decode,
        max_rows=settings.engine.max_rows,
        kv_budget_bytes=budget.kv_cache,
        runner=best_runner(decoder, bank, budget.kv_cache, compiled=compiled, cache=settings.cache),
        speculator=Speculator() if settings.engine.speculation else None,
        gate=place.gate,
    )
    if settings.engine.slo_gate:
        measure_costs(place.gate.costs, engine.runner, settings.engine.max_rows, PREFILL_TOKENS)
    return engine


def _native_trainer(place: _Place, decoder: Decoder) -> Trainer:
    settings, budget, processes = place.settings, place.budget, place.settings.training.trainer_processes
    native = NativeTrainer(
        decoder,
        max_rank=settings.engine.max_rank,
        slice_tokens=place.slice_tokens,
        limits=limits_for(decoder, budget.activations),
        compiled=settings.engine.cpu_kernels,
        cache=settings.cache,
        base_model=place.model,
        memory_bytes=budget.training_states,
        canary=canary_tokens(Chat.load(place.folder).encode),
    )

    def start_group() -> TrainingGroup:
        from rookery.worker.trainer.fsdp.group import GroupOptions, TrainingGroup  # a second, where it is needed

        recompute = settings.training.activation_checkpointing
        return TrainingGroup(GroupOptions(processes, place.folder, decoder.dtype, place.device.type, recompute))

    sharded = FsdpTrainer(
        start_group,
        place.folder,
        max_rank=settings.engine.max_rank,
        slice_tokens=place.slice_tokens,
        base_model=place.model,
        memory_bytes=budget.training_states * (processes if place.device.type == "cuda" else 1),
        exports=settings.cache / ADAPTERS,
        claim=native.states.claim if processes == 1 else None,
    )
    return TrainerRouter(native, sharded) if processes == 1 else sharded


def _use_amx(config: DecoderConfig, max_rank: int) -> bool:
    """Whether the products of this model may use tile instructions; see :func:`disable_amx_if_unsafe`."""
    shapes = [[config.site_shape(part) for part in parts] for parts in SITES.values()]
    base = [(parts[0][0], sum(outputs for _, outputs in parts)) for parts in shapes]
    return not disable_amx_if_unsafe(torch.get_num_threads(), base, max(map(len, shapes)) * max_rank)
