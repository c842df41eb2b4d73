"""Engine, trainers and base model of a worker: the calls that need more than one of them, and how they are loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rookery import protocol
from rookery.errors import UserError
from rookery.scheduling.pipelines import SlowdownTable
from rookery.settings import Settings
from rookery.tokenization.chat import Chat
from rookery.tokenization.grammar import ReplyGrammar
from rookery.tokenization.registry import WEIGHTS, Backends, BaseReference, base_reference, choose_backends, inspect
from rookery.worker import device, memory, teams
from rookery.worker.engine.base import Engine
from rookery.worker.engine.native.drafts import Speculator
from rookery.worker.engine.native.engine import PREFILL_TOKENS, NativeEngine
from rookery.worker.engine.native.runner import KernelRunner, WeightSets, best_runner
from rookery.worker.engine.runner import Runner
from rookery.worker.engine.slo_gate import SloGate, measure_costs
from rookery.worker.engine.vllm.loading import cache_alone, load_vllm
from rookery.worker.grammars import Grammars
from rookery.worker.lane_plan import measure_slowdowns
from rookery.worker.memory import MemoryBudget, MemoryUse, NoRoom
from rookery.worker.model.adapter import ResidentModel
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
from rookery.worker.transfer.cache import ADAPTERS

if TYPE_CHECKING:
    from rookery.worker.model.transformers_model import TransformersModel
    from rookery.worker.trainer.fsdp.group import TrainingGroup

log = logging.getLogger("rookery.worker")

GPU_SLICE_TOKENS = 16384
"""Tokens of one training micro-batch on a GPU, where a pass must outlast the launches of its kernels."""


NO_TRAINING = "the worker does not train"
FULL_PARAMETERS = "a full-parameter policy trains"


@dataclass(frozen=True)
class Implementation:
    """The names of a worker's engine, its device, and the type of its numbers, as it reports them."""

    engine: str = ""
    device: str = ""
    dtype: str = ""


UNNAMED = Implementation()


class WorkerCore:
    """Engine, trainers and base model of a worker."""

    def __init__(
        self,
        engine: Engine,
        queue: OperationQueue[Trainer],
        budget: MemoryBudget | None = None,
        *,
        gate: SloGate | None = None,
        implementation: Implementation = UNNAMED,
        no_lanes: str = NO_TRAINING,
        slowdowns: SlowdownTable | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """``queue``: of training operations, with their trainers. ``gate``: the engine's, if it has one. ``grammars``:
        of replies, if the engine follows any. ``no_lanes``: why training cannot run beside decoding; empty where it
        can. ``slowdowns``: of both beside each other, where they were measured."""
        self.engine = engine
        self.queue = queue
        self.budget = budget
        self.gate = gate or SloGate(enabled=False)
        self.time = queue.time
        engine.share_time(self.time)
        self.implementation = implementation
        self.no_lanes = no_lanes
        self.slowdowns = slowdowns
        self.grammars = grammars

    def memory_of_training(self) -> dict[str, MemoryUse]:
        """Use of the parts of the memory budget that are not the engine's."""
        parts = self.queue.memory()
        if self.budget is not None:
            parts = parts | {"base": MemoryUse(self.budget.base, self.budget.base)}
        return parts if self.grammars is None else parts | {"grammars": self.grammars.memory()}

    def why_turns(self) -> str:
        """Why training cannot run beside decoding now; empty where it can. A full-parameter policy computes by
        PyTorch's operations, whose sums depend on the number of threads."""
        full = self.queue.pending_of(self.queue.full)
        return self.no_lanes or (FULL_PARAMETERS if full else "")

    def submit(
        self, generate: protocol.Generate, folder: Path | None, arrived: float, grammar: ReplyGrammar | None = None
    ) -> bool:
        """Submit a request to the engine; False if its adapter is neither in memory nor in ``folder``. ``arrived``:
        when the worker got it, in monotonic seconds. ``grammar``: that of its schema. Raises the engine's error for an
        impossible request, ``NoRoom`` while adapters in use leave no room for its own."""
        if generate.adapter is not None and not self._ensure_resident(generate.adapter, folder):
            return False
        self.engine.submit(generate, grammar)
        self.queue.weights[generate.tenant] = generate.weight
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
        if self.implementation.engine not in ("native", "transformers"):
            return
        try:
            self.engine.add_adapter(ref, folder)
        except (NoRoom, UserError) as error:
            log.info("version %s of %s is not loaded ahead: %s", ref.hash[:12], ref.policy, error)

    def evict_adapters(self, digests: Sequence[str]) -> None:
        """Nothing will name these versions: again, or ever, where they were loaded by :meth:`prepare` and are not
        committed."""
        for digest in digests:
            self.engine.evict_adapter(digest)

    def discard_offloaded(self, digests: Sequence[str]) -> None:
        """Delete the offloaded training states of these versions, which nothing will name."""
        for trainer in self.queue.trainers:
            for digest in digests:
                trainer.discard_offloaded(digest)

    def clear_offloaded(self) -> None:
        """Delete all offloaded training states."""
        for trainer in self.queue.trainers:
            trainer.clear_offloaded()

    def evict_state(self, policy: str, *, offload: bool) -> None:
        """Delete the policy's training state and its operations; with ``offload``, the state can be restored."""
        for trainer in self.queue.trainers:
            if offload:
                trainer.offload(policy)
            else:
                trainer.evict(policy)

    def _ensure_resident(self, ref: protocol.AdapterRef, folder: Path | None) -> bool:
        """Whether the adapter is in memory, read from ``folder`` if needed."""
        if folder is not None:
            self.engine.add_adapter(ref, folder)
        return self.engine.has_adapter(ref.hash)


@dataclass(frozen=True)
class _Resources:
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
    """How one of :data:`_BACKENDS` is loaded: ``model(folder, settings, device)``; over it the engine, and the queue of
    training operations with its trainers."""

    model: Callable[[Path, Settings, torch.device], Any]
    engine: Callable[[_Resources, Any], Engine]
    queue: Callable[[_Resources, Any], OperationQueue[Trainer]]


def load_core(
    folder: Path, settings: Settings, between_layers: Callable[[], None], *, trains: bool = True
) -> WorkerCore:
    """Engine and trainers with the base model of the prepared ``folder``. ``between_layers`` is for
    :class:`NativeBackbone`. A vLLM worker that does not train loads the model in vLLM only. Raises ``UserError`` if it
    does not fit the memory budget, or the settings name an engine or trainer that does not compute it."""
    where = device.choose(settings.worker.device)
    total, before = memory.total_bytes(settings, where), device.used_bytes(where)
    inspected = inspect(folder)
    chosen = choose_backends(inspected, settings.engine.inference_engine, settings.training.trainer)
    log.info("engine %s, trainer %s: %s", chosen.engine, chosen.trainer, chosen.why)
    if chosen.engine == "vllm" and not trains:
        dtype = str(best_dtype()).removeprefix("torch.")
        cache = None if settings.engine.vllm_url else cache_alone(folder, where.type, before, total)
        engine: Engine = load_vllm(folder, settings, dtype, cache)
        return WorkerCore(engine, OperationQueue(), implementation=Implementation("vllm", str(where), dtype))
    needed = [name for name in dict.fromkeys((chosen.engine, chosen.trainer)) if name in _BACKENDS]
    models = {backend: _BACKENDS[backend].model(folder, settings, where) for backend in needed}
    dtype = str(models[chosen.trainer].dtype).removeprefix("torch.")
    mapped = (folder / WEIGHTS).stat().st_size  # on a CPU not all of it is in memory yet
    budget = memory.divide(total, max(device.used_bytes(where), before + mapped), where.type)
    gate = SloGate(enabled=settings.engine.slo_gate)
    chat, base = Chat.load(folder), base_reference(folder)
    resources = _Resources(folder, settings, base, chat, inspected.not_native, where, budget, gate, between_layers)
    grammars = None
    if chosen.engine == "vllm":
        engine = load_vllm(folder, settings, dtype, budget.kv_cache if where.type == "cpu" else None)
    else:
        grammars = Grammars(partial(chat.grammars, models[chosen.engine].vocab))
        engine = _BACKENDS[chosen.engine].engine(resources, models[chosen.engine])
    queue = _BACKENDS[chosen.trainer].queue(resources, models[chosen.trainer])
    no_lanes = _why_no_lanes(resources, chosen, engine, models[chosen.trainer].dtype) if trains else NO_TRAINING
    if no_lanes and settings.worker.lanes == "beside":
        log.warning("ROOKERY_LANES is beside, but engine and trainer take turns: %s", no_lanes)
    slowdowns = None
    if settings.worker.lanes == "auto" and not no_lanes and isinstance(engine, NativeEngine):
        backbone = NativeBackbone(models["native"], cache=settings.cache)
        rows = settings.engine.max_rows
        slowdowns = measure_slowdowns(torch.get_num_threads(), engine.runner, backbone, gate.costs, rows, where)
        log.info("slowdowns of decoding and training beside each other: %s", slowdowns.figures())
    return WorkerCore(
        engine, queue, budget, gate=gate, implementation=Implementation(chosen.engine, str(where), dtype),
        no_lanes=no_lanes, slowdowns=slowdowns, grammars=grammars,
    )  # fmt: skip


def _why_no_lanes(resources: _Resources, chosen: Backends, engine: Engine, dtype: torch.dtype) -> str:
    """Why training cannot run beside decoding in this worker; empty where it can."""
    if (chosen.engine, chosen.trainer) != ("native", "native"):
        return f"engine {chosen.engine} and trainer {chosen.trainer} take turns"
    if resources.settings.training.trainer_processes > 1:
        return "the trainer is a group of processes"
    if resources.device.type == "cpu" and torch.get_num_threads() < 2:
        return "the worker computes with one core"
    kernels = isinstance(engine, NativeEngine) and isinstance(engine.runner, KernelRunner)
    return teams.why_inexact(resources.device, dtype, kernels=kernels)


def _engine(
    resources: _Resources,
    model: ResidentModel,
    loras: LoraManager,
    runner: Runner,
    speculator: Speculator | None = None,
) -> NativeEngine:
    settings = resources.settings.engine
    engine = NativeEngine(
        WeightSets(model, loras, runner),
        resources.chat.decode,
        max_rows=settings.max_rows,
        speculator=speculator,
        gate=resources.gate,
    )
    if settings.slo_gate or resources.settings.worker.lanes == "auto":
        measure_costs(resources.gate.costs, runner, resources.device, settings.max_rows, PREFILL_TOKENS)
    return engine


def _queue(resources: _Resources, backbone: Backbone) -> OperationQueue[Trainer]:
    settings, budget, processes = resources.settings, resources.budget, resources.settings.training.trainer_processes
    packed = PackedTrainer(
        backbone,
        max_rank=settings.engine.max_rank,
        slice_tokens=resources.slice_tokens,
        base=resources.base,
        memory_bytes=budget.training_states,
        canary=canary_tokens(resources.chat.encode),
    )
    if resources.not_native:
        if processes > 1:
            raise UserError(f"ROOKERY_TRAINER_PROCESSES is {processes}, but {resources.not_native}; set it to 1")
        return OperationQueue(packed, packed)

    def start_group() -> TrainingGroup:
        from rookery.worker.trainer.fsdp.group import GroupOptions, TrainingGroup  # a second, where it is needed

        recompute = settings.training.activation_checkpointing
        return TrainingGroup(
            GroupOptions(processes, resources.folder, backbone.model.dtype, resources.device.type, recompute)
        )

    sharded = FsdpTrainer(
        start_group,
        resources.folder,
        max_rank=settings.engine.max_rank,
        slice_tokens=resources.slice_tokens,
        memory_bytes=budget.training_states * (processes if resources.device.type == "cuda" else 1),
        max_tokens=backbone.limits.max_tokens,
        exports=settings.cache / ADAPTERS,
        claim=packed.states.claim if processes == 1 else None,
    )
    return OperationQueue(packed if processes == 1 else sharded, sharded)


# --- the native decoder ---------------------------------------------------------------------------------------------


def _decoder(folder: Path, settings: Settings, where: torch.device) -> Decoder:
    if where.type == "cpu" and not _use_amx(DecoderConfig.read(folder), settings.engine.max_rank):
        log.warning(
            "AMX is off: with %d threads and ranks up to %d, texts of this model would depend on their batch",
            torch.get_num_threads(),
            settings.engine.max_rank,
        )
    return Decoder.load(folder, device=where, pack=settings.engine.pack_weights)


def _native_engine(resources: _Resources, decoder: Decoder) -> Engine:
    settings, budget = resources.settings, resources.budget
    loras = LoraManager(decoder.config, decoder.dtype, decoder.device, settings.engine.max_rank, budget.adapters)
    compiled = settings.engine.cpu_kernels
    runner = best_runner(decoder, loras, budget.kv_cache, compiled=compiled, cache=settings.cache)
    return _engine(resources, decoder, loras, runner, Speculator() if settings.engine.speculation else None)


def _native_queue(resources: _Resources, decoder: Decoder) -> OperationQueue[Trainer]:
    settings, limits = resources.settings, limits_for(decoder, resources.budget.activations)
    compiled = settings.engine.cpu_kernels
    backbone = NativeBackbone(
        decoder, limits, compiled=compiled, cache=settings.cache, between_layers=resources.between_layers
    )
    return _queue(resources, backbone)


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


def _transformers_engine(resources: _Resources, model: TransformersModel) -> Engine:
    from rookery.worker.engine.hf.runner import transformers_runner
    from rookery.worker.probe import refusals, try_engine

    max_rank, budget = resources.settings.engine.max_rank, resources.budget.adapters
    loras = LoraManager(model.projections, model.dtype, model.device, max_rank, budget)
    with refusals(resources.folder):
        runner = transformers_runner(model, loras, resources.budget.kv_cache)
        try_engine(model, runner, loras)
        return _engine(resources, model, loras, runner)


def _transformers_queue(resources: _Resources, model: TransformersModel) -> OperationQueue[Trainer]:
    from rookery.worker.probe import refusals, try_trainer
    from rookery.worker.trainer.hf.trainer import TransformersBackbone

    with refusals(resources.folder):
        backbone = TransformersBackbone(model, resources.budget.activations)
        try_trainer(model, backbone)
        return _queue(resources, backbone)


_BACKENDS = {
    "native": _Backend(_decoder, _native_engine, _native_queue),
    "transformers": _Backend(_transformers_model, _transformers_engine, _transformers_queue),
}
"""By the names of :class:`~rookery.tokenization.registry.Backends`."""
