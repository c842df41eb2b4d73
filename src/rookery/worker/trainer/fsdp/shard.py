"""One process's part of a policy in training. Every process of the group calls the same methods in the same order.

Promises:

* Gradients are sums over all processes and all passes since :meth:`PolicyShard.zero_grad`; sequences are divided among
  the processes, and one without a sequence computes a pass without loss.
* A step is AdamW on the summed gradient, clipped by its norm over all processes. A loss, gradient or result that is not
  finite in one process skips the step in all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rookery import protocol
from rookery.worker.model.adapter import Adapter
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.published import read_published
from rookery.worker.trainer.fsdp import versions
from rookery.worker.trainer.fsdp.module import (
    LoraLinear,
    PolicyModule,
    build,
    fill,
    local,
    lora_of,
    set_weights,
    weights_of,
    whole,
)
from rookery.worker.trainer.operation_loss import compares, operation_loss
from rookery.worker.trainer.optim import CLIP_EPS, MOMENTS, AdapterExport, Vectors, apply_adamw, is_finite_step


@dataclass(frozen=True)
class PassResult:
    """Sums of metrics over the sequences of one process, and their log-probabilities, one tensor each."""

    metrics: dict[str, float]
    logprobs: list[Tensor]


class PolicyShard:
    """Nothing is loaded at first."""

    def __init__(self, model: Path, mesh: DeviceMesh, dtype: torch.dtype, *, recompute: bool) -> None:
        """``model`` is the prepared folder of the base model; the others as in
        :func:`rookery.worker.trainer.fsdp.module.build`."""
        self._model = model
        self._config = DecoderConfig.read(model)
        self._mesh = mesh
        self._dtype = dtype
        self._recompute = recompute
        self._device = torch.device("cuda", dist.get_rank()) if mesh.device_type == "cuda" else torch.device("cpu")
        self._module: PolicyModule | None = None
        self._adapter: Adapter | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        """Trained ones by name."""
        self._moments: dict[str, dict[str, Tensor]] = {}
        """Their AdamW moments, sharded as they are: by moment, then by name."""
        self._step = 0
        self._reference: dict[str, Tensor] = {}
        """This process's shards of the version that KL penalties compare with."""
        self._nonfinite = False

    # --- state ------------------------------------------------------------------------------------------------------

    def load(self, folder: Path, lora: bool) -> None:
        """Hold the version in ``folder``: a LoRA, or all parameters."""
        self.unload()
        export = AdapterExport.read(folder, self._config) if lora else None
        self._adapter = export.adapter if export is not None else None
        self._module = build(self._model, self._mesh, self._dtype, self._adapter, recompute=self._recompute)
        self._parameters = dict(lora_of(self._module) if lora else weights_of(self._module))
        self._moments = {name: self._zeros() for name in MOMENTS}
        self._step = 0
        for key, zeros in self._zeros().items():
            self._parameters[key].grad = zeros
        if export is not None:
            set_weights(self._module, versions.base_weights(self._model, self._config))
            for key, parameter in self._parameters.items():
                layer, part, side = key.split(".")
                fill(parameter, export.adapter.weights[int(layer), part]["AB".index(side)])
                for name in MOMENTS if export.moments else ():
                    fill(self._moments[name][key], export.moments[f"{key}.{name}"])
            self._step = export.step
        elif versions.has_state(folder):
            self._step = versions.load_state(folder, self._tensors())
        else:
            set_weights(self._module, read_published(folder))

    def load_reference(self, folder: Path) -> None:
        """Keep the LoRA in ``folder`` as the version that KL penalties compare with."""
        adapter = AdapterExport.read(folder, self._config).adapter
        self._reference = {}
        for key, parameter in self._parameters.items():
            layer, part, side = key.split(".")
            shard = torch.empty_like(parameter.detach())
            fill(shard, adapter.weights[int(layer), part]["AB".index(side)])
            self._reference[key] = local(shard)

    def unload(self) -> None:
        """Free all memory."""
        self._module = self._adapter = None
        self._parameters, self._moments, self._reference = {}, {}, {}
        self._nonfinite = False

    def export(self, folder: Path) -> AdapterExport | None:
        """Write the present version, all parameters, into ``folder``, which all processes reach; of a LoRA, the first
        process returns it instead."""
        assert self._module is not None
        if self._adapter is None:
            tensors = self._tensors()
            versions.write(folder, self._model, self._dtype, tensors, self._step, whole)
            return None
        weights: dict[tuple[int, str], tuple[Tensor, ...]] = {}
        moments = {}
        for key, parameter in self._parameters.items():
            layer, part, _ = key.split(".")
            weights[int(layer), part] = (*weights.get((int(layer), part), ()), whole(parameter))
            for name in MOMENTS if self._step else ():
                moments[f"{key}.{name}"] = whole(self._moments[name][key])
        pairs = {key: (pair[0], pair[1]) for key, pair in weights.items()}
        adapter = Adapter(self._adapter.rank, self._adapter.alpha, pairs, self._adapter.rslora)
        return AdapterExport(adapter, moments, self._step) if dist.get_rank() == 0 else None

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """Weights and moments by name."""
        return {"weights": {key: parameter.detach() for key, parameter in self._parameters.items()}, **self._moments}

    def _zeros(self) -> dict[str, Tensor]:
        """One tensor as each parameter, sharded as it is."""
        return {key: torch.zeros_like(parameter.detach()) for key, parameter in self._parameters.items()}

    # --- operations -------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            local(parameter.grad).zero_()
        self._nonfinite = False

    def forward_backward(self, op: protocol.ForwardBackward, sequences: Sequence[protocol.Datum]) -> PassResult:
        """One pass over this process's sequences; with ``op.forward_only`` no gradient is computed."""
        assert self._module is not None
        lengths = [len(sequence.tokens) for sequence in sequences]
        tokens = torch.zeros(max(1, len(sequences)), max(lengths, default=1), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            tokens[row, : lengths[row]] = torch.tensor(sequence.tokens)
        counts = [len(protocol.integers(sequence.targets)) for sequence in sequences]
        row_of = torch.arange(len(sequences)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
        rows = self._column([protocol.integers(s.rows) for s in sequences], torch.int64).cpu()
        at = torch.stack((row_of, rows), 1).to(self._device)
        targets = self._column([protocol.integers(s.targets) for s in sequences], torch.int64)
        tokens = tokens.to(self._device)
        reference = None
        if compares(op):  # of a LoRA only: a full policy keeps no other model
            with torch.no_grad(), self._as_reference(op.reference is not None):
                reference, _ = self._module(tokens, at, targets, op.temperature)
        with torch.set_grad_enabled(not op.forward_only):
            logp, entropy = self._module(tokens, at, targets, op.temperature)
        leaf = logp.detach().requires_grad_()
        columns = [self._column(values, leaf.dtype) for values in _loss_columns(sequences)]
        sampled, advantages, weights = columns
        loss = operation_loss(op, leaf, sampled, advantages, weights, row_of.to(self._device), reference)
        metrics = dict(loss.metrics)
        if not op.forward_only:
            metrics["entropy:sum"] = float(entropy.sum())
            self._nonfinite |= not math.isfinite(metrics["loss:sum"])
            (gradient,) = torch.autograd.grad(loss.total, leaf)
            logp.backward(gradient * dist.get_world_size())  # the processes' gradients are averaged
        return PassResult(metrics, list(leaf.detach().cpu().split(counts)) if counts else [])

    def optim_step(self, adam: protocol.Adam, scale: float) -> dict[str, float]:
        """One AdamW step, with the metrics of :meth:`rookery.worker.trainer.optim.PolicyState.adamw`."""
        gradients = [local(parameter.grad) for parameter in self._parameters.values()]
        squares = sum(gradient.square().sum() for gradient in gradients) * scale**2
        sums = torch.stack([torch.as_tensor(squares).double().cpu(), torch.tensor(float(self._nonfinite)).double()])
        sums = sums.to(self._device)
        dist.all_reduce(sums)
        norm = math.sqrt(float(sums[0])) if math.isfinite(float(sums[0])) else math.nan
        skipped = bool(sums[1]) or not math.isfinite(norm)
        if not skipped:
            factor = scale * (min(1.0, adam.clip / (norm + CLIP_EPS)) if adam.clip > 0 else 1.0)
            overflows = not is_finite_step(adam, self._step, self._shards(), factor)
            anywhere = torch.tensor(float(overflows), device=self._device)
            dist.all_reduce(anywhere)
            skipped = bool(anywhere)
        if not skipped:
            for vectors in self._shards():
                vectors[1].mul_(factor)
                apply_adamw(adam, self._step, vectors)
            self._step += 1
        self.zero_grad()
        return {"grad_norm": norm, "lr": adam.lr, "skipped": float(skipped)}

    def _shards(self) -> Iterator[Vectors]:
        """This process's shards of each parameter, its gradient and moments."""
        for key, parameter in self._parameters.items():
            first, second = (local(self._moments[name][key]) for name in MOMENTS)
            yield local(parameter.detach()), local(parameter.grad), first, second

    @contextmanager
    def _as_reference(self, loaded: bool) -> Iterator[None]:
        """Within, the module computes the version that KL penalties compare with: the loaded one, or the base model."""
        trained = {key: local(parameter).clone() for key, parameter in self._parameters.items()} if loaded else {}
        for key in trained:
            local(self._parameters[key]).copy_(self._reference[key])
        self._enable(loaded)
        try:
            yield
        finally:
            for key, shard in trained.items():
                local(self._parameters[key]).copy_(shard)
            self._enable(True)

    def _enable(self, enabled: bool) -> None:
        assert self._module is not None
        for part in self._module.modules():
            if isinstance(part, LoraLinear):
                part.enabled = enabled

    def _column(self, values: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        return torch.tensor([value for row in values for value in row], dtype=dtype, device=self._device)


def _loss_columns(sequences: Sequence[protocol.Datum]) -> list[list[Sequence[float]]]:
    """The columns in the order of a loss's arguments."""
    columns = ([getattr(s, name) for s in sequences] for name in ("logprobs", "advantages", "weights"))
    return [[protocol.floats(values) for values in column] for column in columns]
