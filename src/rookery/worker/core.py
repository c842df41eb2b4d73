"""Engine, trainer and base model of a worker: the calls that need more than one of them, and how they are loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rookery import protocol
from rookery.errors import UserError
from rookery.scheduling.worker_time import WorkerTime
from rookery.settings import Settings
from rookery.tokenization.chat import Chat
from rookery.tokenization.registry import WEIGHTS, BaseReference, base_reference, choose_backends, inspect
from rookery.worker import device, memory
from rookery.worker.engine.base import Engine
from rookery.worker.engine.native.drafts import Speculator
from rookery.worker.engine.native.engine import PREFILL_TOKENS, NativeEngine
from rookery.worker.engine.native.runner import Runner, best_runner
from rookery.worker.engine.native.slo_gate import SloGate, measure_costs
from rookery.worker.engine.vllm.loading import cache_alone, load_vllm
from rookery.worker.memory import MemoryBudget, MemoryUse, NoRoom
from rookery.worker.model.base import ResidentModel
from rookery.worker.model.batch_invariance import disable_amx_if_unsafe
from rookery.worker.model.canary import canary_tokens
from rookery.worker.model.config import SITES, DecoderConfig
from rookery.worker.model.decoder import Decoder, best_dtype
from rookery.worker.model.lora import LoraManager
from rookery.worker.trainer.base import Trainer
from rookery.worker.trainer.fsdp.trainer import FsdpTrainer
from rookery.worker.trainer.native.backbone import NativeBackbone, limits_for
from rookery.worker.trainer.operation_queue import OperationQueue
from rookery.worker.trainer.packed_pass import Backbone
from rookery.worker.trainer.packed_trainer import PackedTrainer
from rookery.worker.trainer.trainers import Trainers
from rookery.worker.transfer.cache import ADAPTERS

if TYPE_CHECKING:
    from rookery.worker.model.transformers_model import TransformersModel
    from rookery.worker.trainer.fsdp.group import TrainingGroup

log = logging.getLogger("rookery.worker")

GPU_SLICE_TOKENS = 16384
"""Tokens of one training micro-batch on a GPU, where a pass must outlast the launches of its kernels."""


class WorkerCore:
    """Engine, trainer and base model of a worker."""

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        budget: MemoryBudget | None = None,
        *,
        gate: SloGate | None = None,
        engine_name: str = "",
        device_name: str = "",
        dtype: str = "",
    ) -> None:
        """``gate``: the engine's, if it has one."""
        self.engine = engine
        self.trainer = trainer
        self.budget = budget
        self.gate = gate or SloGate(enabled=False)
        self.time = WorkerTime(trainer.weights)
        engine.share_time(self.time)
        trainer.share_time(self.time)
        self.engine_name = engine_name
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
        self.trainer.weights[generate.tenant] = generate.weight
        self.gate.set_arrival(generate.request, arrived)
        return True

    def switch(self, request: str, ref: protocol.AdapterRef, folder: Path | None, *, recompute: bool) -> bool:
        """Continue a request with ``ref``; False if that is neither in memory nor in ``folder``. A request that has
        ended does not change. Raises ``NoRoom`` as :meth:`submit`."""
        if not self._ensure_resident(ref, folder):
            return False
        self.engine.switch_adapter(request, ref, recompute=recompute)
        return True

    def prepare(self, ref: protocol.AdapterRef, folder: Path) -> None:
        """``ref`` is about to be committed: have its weights in memory, if there is room. Its requests load it
        otherwise. ``folder`` is a private one, which an engine that keeps paths cannot use."""
        if self.engine_name not in ("native", "transformers"):
            return
        try:
            self.engine.add_adapter(ref, folder)
        except (NoRoom, UserError) as error:
            log.info("version %s of %s is not loaded ahead: %s", ref.hash[:12], ref.policy, error)

    def withdraw(self, *digests: str) -> None:
        """These versions of :meth:`prepare` are not committed."""
        for digest in digests:
            self.engine.evict_adapter(digest)

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
    base: BaseReference
    """The base model's name in exported adapters."""
    chat: Chat
    not_native: str
    """Why the native decoder does not compute the model; empty if it does."""
    device: torch.device
    budget: MemoryBudget
    gate: SloGate
    between_layers: Callable[[], None]

    @property
    def slice_tokens(self) -> int:
        training = self.settings.training
        return GPU_SLICE_TOKENS if self.device.type == "cuda" else training.slice_tokens


@dataclass(frozen=True)
class _Backend:
    """How one of :data:`_BACKENDS` is loaded: ``model(folder, settings, device)``, and engine and trainer over it."""

    model: Callable[[Path, Settings, torch.device], Any]
    engine: Callable[[_Place, Any], Engine]
    trainer: Callable[[_Place, Any], Trainer]


def load_core(
    folder: Path, settings: Settings, between_layers: Callable[[], None], *, trains: bool = True
) -> WorkerCore:
    """With the base model of the prepared ``folder``. ``between_layers`` is for :class:`NativeBackbone`. A vLLM worker
    that does not train loads the model in vLLM only. Raises ``UserError`` if it does not fit the memory budget, or the
    settings name an engine or trainer that does not compute it."""
    where = device.choose(settings.worker.device)
    total, before = memory.total_bytes(settings, where), device.used_bytes(where)
    inspected = inspect(folder)
    chosen = choose_backends(inspected, settings.engine.inference_engine, settings.training.trainer)
    log.info("engine %s, trainer %s: %s", chosen.engine, chosen.trainer, chosen.why)
    if chosen.engine == "vllm" and not trains:
        dtype = str(best_dtype()).removeprefix("torch.")
        cache = None if settings.engine.vllm_url else cache_alone(folder, where.type, before, total)
        engine: Engine = load_vllm(folder, settings, dtype, cache)
        return WorkerCore(engine, Trainers(OperationQueue()), engine_name="vllm", device_name=str(where), dtype=dtype)
    needed = [name for name in dict.fromkeys((chosen.engine, chosen.trainer)) if name in _BACKENDS]
    models = {backend: _BACKENDS[backend].model(folder, settings, where) for backend in needed}
    dtype = str(models[chosen.trainer].dtype).removeprefix("torch.")
    mapped = (folder / WEIGHTS).stat().st_size  # on a CPU not all of it is in memory yet
    budget = memory.divide(total, max(device.used_bytes(where), before + mapped), where.type)
    gate = SloGate(enabled=settings.engine.slo_gate)
    chat, base = Chat.load(folder), base_reference(folder)
    place = _Place(folder, settings, base, chat, inspected.not_native, where, budget, gate, between_layers)
    if chosen.engine == "vllm":
        engine = load_vllm(folder, settings, dtype, budget.kv_cache if where.type == "cpu" else None)
    else:
        engine = _BACKENDS[chosen.engine].engine(place, models[chosen.engine])
    trainer = _BACKENDS[chosen.trainer].trainer(place, models[chosen.trainer])
    names = {"engine_name": chosen.engine, "device_name": str(where), "dtype": dtype}
    return WorkerCore(engine, trainer, budget, gate=gate, **names)


def _engine(
    place: _Place, model: ResidentModel, loras: LoraManager, runner: Runner, speculator: Speculator | None = None
) -> NativeEngine:
    settings = place.settings.engine
    engine = NativeEngine(
        model,
        loras,
        place.chat.decode,
        max_rows=settings.max_rows,
        kv_budget_bytes=place.budget.kv_cache,
        runner=runner,
        speculator=speculator,
        gate=place.gate,
        grammars=lambda: place.chat.grammars(model.vocab),
    )
    if settings.slo_gate:
        measure_costs(place.gate.costs, runner, place.device, settings.max_rows, PREFILL_TOKENS)
    return engine


def _trainer(place: _Place, backbone: Backbone) -> Trainer:
    settings, budget, processes = place.settings, place.budget, place.settings.training.trainer_processes
    queue = OperationQueue()
    packed = PackedTrainer(
        backbone,
        max_rank=settings.engine.max_rank,
        slice_tokens=place.slice_tokens,
        base=place.base,
        memory_bytes=budget.training_states,
        canary=canary_tokens(place.chat.encode),
        queue=queue,
    )
    if place.not_native:
        if processes > 1:
            raise UserError(f"ROOKERY_TRAINER_PROCESSES is {processes}, but {place.not_native}; set it to 1")
        return packed

    def start_group() -> TrainingGroup:
        from rookery.worker.trainer.fsdp.group import GroupOptions, TrainingGroup  # a second, where it is needed

        recompute = settings.training.activation_checkpointing
        return TrainingGroup(GroupOptions(processes, place.folder, backbone.model.dtype, place.device.type, recompute))

    sharded = FsdpTrainer(
        start_group,
        place.folder,
        max_rank=settings.engine.max_rank,
        slice_tokens=place.slice_tokens,
        base=place.base,
        memory_bytes=budget.training_states * (processes if place.device.type == "cuda" else 1),
        max_tokens=backbone.limits.max_tokens,
        exports=settings.cache / ADAPTERS,
        claim=packed.states.claim if processes == 1 else None,
        queue=queue,
    )
    return Trainers(queue, packed, sharded) if processes == 1 else sharded


# --- the native decoder ---------------------------------------------------------------------------------------------


def _decoder(folder: Path, settings: Settings, where: torch.device) -> Decoder:
    if where.type == "cpu" and not _use_amx(DecoderConfig.read(folder), settings.engine.max_rank):
        log.warning(
            "AMX is off: with %d threads and ranks up to %d, texts of this model would depend on their batch",
            torch.get_num_threads(),
            settings.engine.max_rank,
        )
    return Decoder.load(folder, device=where, pack=settings.engine.pack_weights)


def _native_engine(place: _Place, decoder: Decoder) -> Engine:
    settings, budget = place.settings, place.budget
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, settings.engine.max_rank, budget.adapters)
    compiled = settings.engine.cpu_kernels
    runner = best_runner(decoder, loras, budget.kv_cache, compiled=compiled, cache=settings.cache)
    return _engine(place, decoder, loras, runner, Speculator() if settings.engine.speculation else None)


def _native_trainer(place: _Place, decoder: Decoder) -> Trainer:
    settings, limits = place.settings, limits_for(decoder, place.budget.activations)
    compiled = settings.engine.cpu_kernels
    backbone = NativeBackbone(
        decoder, limits, compiled=compiled, cache=settings.cache, between_layers=place.between_layers
    )
    return _trainer(place, backbone)


def _use_amx(config: DecoderConfig, max_rank: int) -> bool:
    """Whether the products of this model may use tile instructions; see :func:`disable_amx_if_unsafe`."""
    shapes = [[config.site_shape(part) for part in parts] for parts in SITES.values()]
    base = [(parts[0][0], sum(outputs for _, outputs in parts)) for parts in shapes]
    return not disable_amx_if_unsafe(torch.get_num_threads(), base, max(map(len, shapes)) * max_rank)


# --- models of transformers, which takes seconds to import ----------------------------------------------------------


def _transformers_model(folder: Path, settings: Settings, where: torch.device) -> TransformersModel:
    from rookery.worker.model.transformers_model import TransformersModel
    from rookery.worker.probe import refusals

    with refusals(folder):
        return TransformersModel.load(folder, device=where)


def _transformers_engine(place: _Place, model: TransformersModel) -> Engine:
    from rookery.worker.engine.hf.runner import transformers_runner
    from rookery.worker.probe import refusals, try_engine

    max_rank, budget = place.settings.engine.max_rank, place.budget.adapters
    loras = LoraManager(model.projections, model.dtype, model.device, max_rank, budget)
    with refusals(place.folder):
        runner = transformers_runner(model, loras, place.budget.kv_cache)
        try_engine(model, runner, loras)
        return _engine(place, model, loras, runner)


def _transformers_trainer(place: _Place, model: TransformersModel) -> Trainer:
    from rookery.worker.probe import refusals, try_trainer
    from rookery.worker.trainer.hf.trainer import TransformersBackbone

    with refusals(place.folder):
        backbone = TransformersBackbone(model, place.budget.activations)
        try_trainer(model, backbone)
        return _trainer(place, backbone)


_BACKENDS = {
    "native": _Backend(_decoder, _native_engine, _native_trainer),
    "transformers": _Backend(_transformers_model, _transformers_engine, _transformers_trainer),
}
"""By the names of :class:`~rookery.tokenization.registry.Backends`."""
