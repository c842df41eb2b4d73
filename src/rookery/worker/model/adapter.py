"""LoRA adapters as PEFT folders, in float32, and the base model that they adapt, as engine and trainer use it.

Promises: what ``write_adapter`` writes, ``peft.PeftModel`` loads to the same function; what ``read_adapter`` accepts
has exactly the meaning that PEFT gives it, anything else is refused with a reason. :mod:`rookery.spec.peft_folder`
judges it, at an upload and here. The delta of a projection is ``scale · B A x``.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from rookery.errors import UserError
from rookery.spec.peft_folder import (
    CONFIG_FILE,
    MODULES,
    PARTS,
    WEIGHTS_FILE,
    Projections,
    ProjectionShapes,
    part_of,
    read_lora,
    target_of,
)

__all__ = ["MODULES", "PARTS", "Adapter", "Projections", "part_of", "read_adapter", "write_adapter"]


class ResidentModel(Protocol):
    """The base model as engine and trainer use it; only runners and backbones know which class it has."""

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        ...

    @property
    def vocab(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def projections(self) -> Projections: ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, hidden], as its runner computes them → logits [n, vocab]."""
        ...


@dataclass(frozen=True)
class Adapter:
    """``weights[layer, part]`` = (A [rank, in], B [out, rank]), float32. Parts that are not targeted are absent.
    ``prefix`` as in :class:`Projections`."""

    rank: int
    alpha: float
    weights: dict[tuple[int, str], tuple[Tensor, Tensor]]
    rslora: bool = False
    prefix: str = "model.layers"

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def modules(self) -> list[str]:
        """Names of the modules that any layer adapts, parts of ``PARTS`` in that order."""
        parts = sorted({part for _, part in self.weights}, key=lambda part: ((*PARTS, part).index(part), part))
        return list(dict.fromkeys(MODULES.get(part, part).rpartition(".")[2] for part in parts))


def targeted(model: Projections, targets: Sequence[str]) -> list[tuple[int, str]]:
    """The projections that ``targets`` (of ``PARTS``) name, in order. ``gate`` names each module that is called
    ``gate_proj`` wherever it is in a layer; all of ``PARTS`` together name every projection. Raises ``UserError`` for a
    target that the model does not have."""
    if set(PARTS) <= set(targets):
        return list(model.shapes)
    named = {key: target_of(key[1]) for key in model.shapes}
    if missing := set(targets) - set(named.values()):
        has = ", ".join(dict.fromkeys(named.values()))
        raise UserError(f"targets: this model has no projection {min(missing)!r} that a LoRA can change; it has {has}")
    return [key for key, name in named.items() if name in targets]


def init_adapter(model: Projections, rank: int, alpha: float, targets: Sequence[str], seed: int) -> Adapter:
    """Version 0: B = 0 and A uniform in ±1/√in (PEFT's default, Kaiming uniform with a = √5), drawn from ``seed``.
    Raises ``UserError`` as :func:`targeted`."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for key in targeted(model, targets):
        inputs, outputs = model.shapes[key]
        bound = 1.0 / math.sqrt(inputs)
        a = torch.rand(rank, inputs, generator=generator).mul_(2 * bound).sub_(bound)
        weights[key] = (a, torch.zeros(outputs, rank))
    return Adapter(rank=rank, alpha=alpha, weights=weights, prefix=model.prefix)


def adapter_numbers(model: Projections, rank: int, targets: Sequence[str]) -> int:
    """Number of weights of an adapter."""
    return rank * sum(sum(model.shapes[key]) for key in targeted(model, targets))


def read_adapter(folder: Path, model: ProjectionShapes) -> Adapter:
    """The adapter in a PEFT folder. Raises ``UserError``, without the folder's path, for what is no LoRA of this
    model."""
    try:
        config, content = (folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"adapter: {Path(error.filename).name} is missing") from None
    lora = read_lora(config, io.BytesIO(content), len(content))
    if problem := lora.misfit(model):
        raise UserError(f"adapter: {problem}")
    try:
        tensors = load(content)  # from bytes: from the file, safetensors 0.8 leaks two objects for each tensor
    except SafetensorError as error:
        raise UserError(f"adapter: {WEIGHTS_FILE} is no safetensors file: {error}") from None
    weights = {
        (layer, part): (
            tensors[_weight_name(lora.prefix, layer, part, "A")].float(),
            tensors[_weight_name(lora.prefix, layer, part, "B")].float(),
        )
        for layer, part in lora.shapes
    }
    return Adapter(rank=lora.rank, alpha=lora.alpha, weights=weights, rslora=lora.rslora, prefix=lora.prefix)


def _weight_name(prefix: str, layer: int, part: str, side: str) -> str:
    return f"base_model.model.{prefix}.{layer}.{MODULES.get(part, part)}.lora_{side}.weight"


def write_adapter(folder: Path, adapter: Adapter, base_model: str = "", revision: str = "") -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors`` (float32) into the existing ``folder``.
    ``base_model`` and its ``revision``: what PEFT loads the base model from."""
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": revision or None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.rslora,
        "target_modules": adapter.modules,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    tensors = {}
    for (layer, part), (a, b) in adapter.weights.items():
        tensors[_weight_name(adapter.prefix, layer, part, "A")] = a.contiguous()
        tensors[_weight_name(adapter.prefix, layer, part, "B")] = b.contiguous()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
