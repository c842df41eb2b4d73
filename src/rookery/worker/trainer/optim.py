"""One policy's training state: float32 weights, gradient and AdamW moments, each one flat vector.

Promises:

* Weights, gradient and moments are float32 whatever the base model's dtype; the copies that multiply the base model's
  activations are computed from the weights after every step.
* A step with a gradient or a result that is not finite changes nothing. No function here reads another policy's state.
* ``export`` is a snapshot: training may continue before it is written. A state loaded from the written files takes the
  same next step, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.adamw import adamw

from rookery import protocol
from rookery.bounds import FLOAT32, FLOAT32_LEAST
from rookery.errors import UserError
from rookery.tokenization.registry import UNNAMED, BaseReference
from rookery.worker.device import finish
from rookery.worker.failures import failure_category
from rookery.worker.model.adapter import Adapter, Projections, read_adapter, write_adapter
from rookery.worker.model.canary import write_canary

STATE_FILE = "trainer_state.safetensors"
GRADIENT_FILE = "gradient.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")

CLIP_EPS = 1e-6
"""Added to the norm before the division by it, as ``torch.nn.utils.clip_grad_norm_`` does."""

CHECKED_NUMBERS = 1 << 20
"""Weights of which a step is computed at once to see whether its result is finite."""

Vectors = tuple[Tensor, Tensor, Tensor, Tensor]
"""Weights, their gradient and moments, of one shape."""


@torch.no_grad()
def apply_adamw(adam: protocol.Adam, step: int, vectors: Vectors) -> None:
    """One step of AdamW (Loshchilov & Hutter, arXiv 1711.05101) in place, after ``step`` others. It calls the function
    of ``torch.optim.AdamW``: the first object of that class imports PyTorch's compiler and sympy, which would take
    longer than all else in a worker's first step."""
    weight, gradient, first, second = vectors
    steps = torch.tensor(float(step), device=weight.device)
    adamw(
        [weight], [gradient], [first], [second], [], [steps], fused=True, amsgrad=False, maximize=False, lr=adam.lr,
        beta1=adam.beta1, beta2=adam.beta2, eps=adam.eps, weight_decay=adam.weight_decay,
    )  # fmt: skip


def is_finite_step(adam: protocol.Adam, step: int, parameters: Iterable[Vectors], factor: float = 1.0) -> bool:
    """Whether weights and moments are finite after :func:`apply_adamw` on ``factor`` times the gradient. Nothing
    changes."""
    return all(
        _is_bounded(adam, step, vectors, factor) or _is_finite(adam, step, vectors, factor) for vectors in parameters
    )


def _is_bounded(adam: protocol.Adam, step: int, vectors: Vectors, factor: float) -> bool:
    """Whether the largest numbers show that all numbers of a step are finite: of nearly every step they do."""
    if not vectors[0].numel():
        return True
    weight, gradient, first, second = map(_largest, vectors)
    first, gradient = max(first, factor * gradient), factor * gradient
    rate, decay = adam.lr / (1 - adam.beta1 ** (step + 1)), adam.lr * adam.weight_decay
    if adam.eps < FLOAT32_LEAST or not all(map(math.isfinite, (weight, gradient, first, second))):
        return False
    move = max(first, 1.0) * max(rate, 1.0) / min(adam.eps, 1.0)
    return max(gradient**2, second, adam.eps, adam.weight_decay, (1 + decay) * max(weight, 1.0) + move) < FLOAT32 / 16


def _largest(vector: Tensor) -> float:
    """The largest absolute value; NaN if one is. Some 15 times as fast as ``vector_norm`` of order infinity."""
    least, most = vector.aminmax()
    return max(-float(least), float(most))


def _is_finite(adam: protocol.Adam, step: int, vectors: Vectors, factor: float) -> bool:
    """:func:`_is_bounded` by a step on copies, a piece at a time."""
    for pieces in zip(*(vector.flatten().split(CHECKED_NUMBERS) for vector in vectors), strict=True):
        weight, gradient, first, second = (piece.clone() for piece in pieces)
        apply_adamw(adam, step, (weight, gradient.mul_(factor), first, second))
        if not all(bool(vector.isfinite().all()) for vector in (weight, first, second)):
            return False
    return True


@contextmanager
def _fitting(name: str) -> Iterator[None]:
    """Raises ``UserError`` for a file, called ``name``, whose content does not fit its adapter. Faults of this worker's
    disk and memory are raised as they are."""
    try:
        yield
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        if failure_category(error) == "lost":
            raise
        raise UserError(f"{name} does not fit its adapter: {error}") from None


def _like(wanted: Tensor, given: Tensor) -> Tensor:
    """``given``, if it has real numbers in the shape of ``wanted``. Raises ``ValueError``."""
    if given.shape != wanted.shape or not given.is_floating_point():
        raise ValueError(f"{given.dtype} of shape {list(given.shape)} where the adapter's is {list(wanted.shape)}")
    return given


@dataclass(frozen=True)
class LoraPart:
    """LoRA of one part of a fused projection, the ``number``-th of that. ``ranks`` are its rows of the projection's
    stacked A, ``outputs`` its columns of the base's output; ``b`` [outputs, rank] is the compute copy of B times the
    adapter's scale, ``d_b`` the float32 gradient of B."""

    number: int
    ranks: slice
    outputs: slice
    b: Tensor
    d_b: Tensor


@dataclass(frozen=True)
class LoraSite:
    """LoRAs of one fused projection: their A stacked [ranks, in] in the compute dtype, with its float32 gradient."""

    a: Tensor
    d_a: Tensor
    parts: list[LoraPart]


@dataclass(frozen=True, eq=False)
class AdapterExport:
    """A version's files, not yet written: the adapter and, once a step was taken, the optimizer's ``moments``. See
    :class:`~rookery.worker.trainer.operation_queue.Export`."""

    adapter: Adapter
    moments: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0
    base: BaseReference = UNNAMED
    canary: Sequence[float] = ()

    @property
    def numbers(self) -> int:
        """Number of weights."""
        return sum(tensor.numel() for pair in self.adapter.weights.values() for tensor in pair)

    @property
    def bytes(self) -> int:
        """Size of all tensors, which are float32."""
        return 4 * self.numbers + sum(tensor.nbytes for tensor in self.moments.values())

    def write(self, folder: Path) -> list[str]:
        """Write into the existing ``folder``; the file names, sorted. Any thread may call it."""
        write_adapter(folder, self.adapter, self.base.name, self.base.revision)
        if self.canary:
            write_canary(folder, self.canary)
        if self.moments:
            # One entry: the order of several differs between processes, and the file's hash with it.
            save_file(self.moments, folder / STATE_FILE, metadata={"step": str(self.step)})
        return sorted(path.name for path in folder.iterdir())

    @classmethod
    def read(cls, folder: Path, model: Projections) -> AdapterExport:
        """The adapter of a PEFT folder, with the optimizer's state if it is there. Raises ``UserError``."""
        adapter, moments, step = read_adapter(folder, model), {}, 0
        path = folder / STATE_FILE
        if path.exists():
            with _fitting(path.name), safe_open(path, framework="pt") as file:
                step = int(file.metadata()["step"])
                moments = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return cls(adapter, moments, step)


@dataclass(frozen=True, eq=False)
class GradientExport:
    """A copy of a policy's accumulated gradient, float32 [numbers], for the worker that has the optimizer's state. See
    :class:`~rookery.worker.trainer.operation_queue.Export`."""

    gradient: Tensor

    @property
    def bytes(self) -> int:
        return self.gradient.nbytes

    def write(self, folder: Path) -> list[str]:
        """Write into the existing ``folder``; the file names."""
        save_file({"gradient": self.gradient}, folder / GRADIENT_FILE)
        return [GRADIENT_FILE]


class PolicyState:
    """Flat float32 vectors with all A first, then all B, each in order of layer, site and part; ``sites[layer, site]``
    are views for the matmuls."""

    def __init__(
        self,
        export: AdapterExport,
        model: Projections,
        dtype: torch.dtype,
        device: torch.device,
        *,
        trained: bool = True,
    ) -> None:
        """Equal to the state that was exported, without its gradient. One that is not ``trained`` computes forward
        passes only, and has the memory of its compute copies. Raises ``UserError`` for moments of another shape."""
        adapter = export.adapter
        self.rank, self.alpha, self.rslora, self.scale = adapter.rank, adapter.alpha, adapter.rslora, adapter.scale
        self.prefix = adapter.prefix
        self._order = [key for key in model.shapes if key in adapter.weights]
        self._layout = [
            (f"{layer}.{part}.{'AB'[side]}", adapter.weights[layer, part][side].shape)
            for side in (0, 1)
            for layer, part in self._order
        ]
        self._sizes = [shape.numel() for _, shape in self._layout]
        tensors = [adapter.weights[key][side] for side in (0, 1) for key in self._order]
        self.masters = torch.cat([t.flatten().float() for t in tensors]).to(device)
        self.trained = trained
        nothing = torch.zeros((), device=device).expand(len(self.masters))  # one number, for all
        self.gradient, self.exp_avg, self.exp_avg_sq = (
            torch.zeros_like(self.masters) if trained else nothing for _ in range(3)
        )
        self.step = export.step
        self.nonfinite_loss = False
        """A loss of the present step was not finite."""
        with _fitting("the optimizer's state"):
            for name in MOMENTS if export.moments and trained else ():
                for key, view in self._named(getattr(self, name)):
                    view.copy_(_like(view, export.moments[f"{key}.{name}"]))
        self._split = sum(self._sizes[: len(self._order)])
        self._compute = torch.empty_like(self.masters, dtype=dtype)
        self.packed: Any = None
        """The copies in the layout of the kernels (``kernel_pass``), made when they are used."""
        self.sites = self._views(model)
        self._refresh()
        if not trained:
            self.masters = nothing

    @staticmethod
    def bytes_for(numbers: int, dtype: torch.dtype, *, trained: bool = True) -> int:
        """Bytes of a state with this number of weights: four float32 vectors, if it is trained, and two copies in
        ``dtype``, one in the kernels' layout."""
        return numbers * (4 * 4 * trained + 2 * dtype.itemsize)

    @property
    def bytes(self) -> int:
        return self.bytes_for(self.masters.numel(), self._compute.dtype, trained=self.trained)

    def export(self, base: BaseReference = UNNAMED, canary: Sequence[float] = ()) -> AdapterExport:
        """A copy of weights and moments as they are now, in main memory; each vector is copied at once."""
        weights: dict[tuple[int, str], list[Tensor]] = {}
        for key, view in self._named(self.masters.to("cpu", copy=True)):
            layer, _, part = key.rpartition(".")[0].partition(".")
            weights.setdefault((int(layer), part), []).append(view)
        adapter = Adapter(
            rank=self.rank,
            alpha=self.alpha,
            weights={key: (pair[0], pair[1]) for key, pair in weights.items()},
            rslora=self.rslora,
            prefix=self.prefix,
        )
        moments = {
            f"{key}.{name}": view
            for name in MOMENTS
            if self.step
            for key, view in self._named(getattr(self, name).to("cpu", copy=True))
        }
        return AdapterExport(adapter, moments, self.step, base, canary)

    def zero_grad(self) -> None:
        """Clear the accumulated gradient and ``nonfinite_loss``."""
        self.gradient.zero_()
        self.nonfinite_loss = False

    def export_gradient(self) -> GradientExport:
        """A copy of the accumulated gradient, in main memory; NaN where a loss was not finite, so that the step is
        skipped also where the copy is added."""
        gradient = self.gradient.to("cpu", copy=True)
        return GradientExport(gradient.fill_(math.nan) if self.nonfinite_loss else gradient)

    def add_gradient(self, folder: Path) -> None:
        """Add the exported gradient in ``folder``. Raises ``UserError`` if it is another adapter's."""
        path = folder / GRADIENT_FILE
        with _fitting("a gradient"):
            if not path.exists():  # safetensors reports every file that it cannot open as missing
                raise ValueError(f"{path.name} is missing")
            with safe_open(path, framework="pt") as file:
                self.gradient.add_(_like(self.gradient, file.get_tensor("gradient")).to(self.gradient))

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(``layer.part.A`` or ``layer.part.B``, its accumulated gradient)."""
        return self._named(self.gradient)

    def adamw(self, adam: protocol.Adam, scale: float = 1.0) -> dict[str, float]:
        """One step of AdamW on ``scale`` times the accumulated gradient, which is then cleared. ``grad_norm`` is the
        norm of the scaled gradient before clipping; ``skipped`` is 1 if it, a loss, or the step's result was not
        finite."""
        self.gradient.mul_(scale)
        norm = float(torch.linalg.vector_norm(self.gradient))
        skipped = self.nonfinite_loss or not math.isfinite(norm)
        vectors = self.masters, self.gradient, self.exp_avg, self.exp_avg_sq
        if not skipped:
            if adam.clip > 0:
                self.gradient.mul_(min(1.0, adam.clip / (norm + CLIP_EPS)))
            skipped = not is_finite_step(adam, self.step, [vectors])
        if not skipped:
            apply_adamw(adam, self.step, vectors)
            self.step += 1
            self._refresh()
        self.zero_grad()
        finish(self.masters.device)
        return {"grad_norm": norm, "lr": adam.lr, "skipped": float(skipped)}

    def _refresh(self) -> None:
        """Compute copies of the weights."""
        self.packed = None
        self._compute[: self._split] = self.masters[: self._split]
        torch.mul(self.masters[self._split :], self.scale, out=self._compute[self._split :])

    def _named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(``layer.part.A`` or ``layer.part.B``, its view of a flat vector)."""
        for (name, shape), piece in zip(self._layout, flat.split(self._sizes), strict=True):
            yield name, piece.view(shape)

    def _views(self, model: Projections) -> dict[tuple[int, str], LoraSite]:
        copies, gradients = dict(self._named(self._compute)), dict(self._named(self.gradient))
        site_of = {part: site for site, parts in model.sites.items() for part in parts}
        sites: dict[tuple[int, str], LoraSite] = {}
        at = 0
        for layer, site in dict.fromkeys((layer, site_of[part]) for layer, part in self._order):
            names = model.sites[site]
            present = [name for name in names if f"{layer}.{name}.B" in copies]
            inputs = model.shapes[layer, present[0]][0]
            size = self.rank * len(present) * inputs
            edges = accumulate((model.shapes[layer, name][1] for name in names), initial=0)
            outputs = dict(zip(names, pairwise(edges), strict=True))
            parts = []
            for index, name in enumerate(present):
                ranks, key = slice(index * self.rank, (index + 1) * self.rank), f"{layer}.{name}.B"
                parts.append(LoraPart(names.index(name), ranks, slice(*outputs[name]), copies[key], gradients[key]))
            sites[layer, site] = LoraSite(
                self._compute[at : at + size].view(-1, inputs), self.gradient[at : at + size].view(-1, inputs), parts
            )
            at += size
        return sites
