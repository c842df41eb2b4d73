"""LoRA adapters as PEFT folders, in float32.

Promises: what ``write_adapter`` writes, ``peft.PeftModel`` loads to the same function; what ``read_adapter`` accepts
has exactly the meaning that PEFT gives it (rank-stabilised scaling included), anything else is refused with a reason.
The delta of a projection is ``scale · B A x``, scale = alpha / rank (LoRA, arXiv:2106.09685), or alpha / √rank with
``use_rslora`` (arXiv:2312.03732).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from rookery.errors import UserError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PARTS = ("q", "k", "v", "o", "gate", "up", "down")
MODULES = {part: ("self_attn" if part in "qkvo" else "mlp") + f".{part}_proj" for part in PARTS}
"""Name of each part's module within a layer, in the families that the native decoder knows."""
_PARTS = {module: part for part, module in MODULES.items()}
_KEY = re.compile(r"(?:base_model\.model\.)?(.+?)\.(\d+)\.(.+)\.lora_([AB])\.weight")
_UNSUPPORTED = ("use_dora", "layer_replication", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
"""PEFT options under which B A x is not the whole delta."""


class Projections(Protocol):
    """The projections of a base model that adapters may change. A part is one of ``PARTS``, or of another family's
    layers the module's name within the layer (``mlp.shared_expert.up_proj``)."""

    @property
    def shapes(self) -> Mapping[tuple[int, str], tuple[int, int]]:
        """(in, out) features of each (layer, part), in order of layers."""
        ...

    @property
    def sites(self) -> Mapping[str, tuple[str, ...]]:
        """Projections that are computed as one, and their parts in order of the output rows."""
        ...

    @property
    def prefix(self) -> str:
        """Name of the list of layers, as PEFT writes it."""
        ...


def part_of(module: str) -> str:
    """The part of a module by its name within the layer."""
    return _PARTS.get(module, module)


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
    named = {key: key[1].rpartition(".")[2].removesuffix("_proj") for key in model.shapes}
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


def read_adapter(folder: Path, model: Projections) -> Adapter:
    """The adapter in a PEFT folder. Raises ``UserError`` for what is no LoRA of this model."""
    try:
        about = json.loads((folder / CONFIG_FILE).read_text())
        # From bytes: from the file, safetensors 0.8 leaks two objects for each tensor.
        tensors = load((folder / WEIGHTS_FILE).read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{folder} is no PEFT adapter: {Path(error.filename).name} is missing") from None
    except (json.JSONDecodeError, SafetensorError) as error:
        raise UserError(f"{folder} is no PEFT adapter: {error}") from None
    if about.get("peft_type") != "LORA":
        raise UserError(f"{folder} holds a {about.get('peft_type')} adapter; only LORA is supported")
    for option in _UNSUPPORTED:
        if about.get(option):
            raise UserError(f"{folder}: LoRA option {option} is not supported")
    if about.get("bias", "none") != "none":
        raise UserError(f"{folder}: LoRA option bias={about['bias']!r} is not supported")
    rank = about["r"]
    parts = {part for _, part in model.shapes}
    pairs: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or match[1] != model.prefix or (part := part_of(match[3])) not in parts:
            raise UserError(f"{folder}: weight {key} is no LoRA of a projection that this base model has")
        pairs.setdefault((int(match[2]), part), {})[match[4]] = tensor.float()
    if not pairs:
        raise UserError(f"{folder} is no PEFT adapter: {WEIGHTS_FILE} holds no weights")
    for (layer, part), pair in pairs.items():
        inputs, outputs = model.shapes.get((layer, part), (0, 0))
        if len(pair) < 2 or pair["A"].shape != (rank, inputs) or pair["B"].shape != (outputs, rank):
            raise UserError(f"{folder}: the LoRA of layer {layer} {part} does not fit this base model at rank {rank}")
    return Adapter(
        rank=rank,
        alpha=about["lora_alpha"],
        weights={site: (pair["A"], pair["B"]) for site, pair in pairs.items()},
        rslora=bool(about.get("use_rslora")),
        prefix=model.prefix,
    )


def write_adapter(folder: Path, adapter: Adapter, base_model: str = "") -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors`` (float32) into the existing ``folder``."""
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.rslora,
        "target_modules": adapter.modules,
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(about, indent=2) + "\n")
    tensors = {}
    for (layer, part), (a, b) in adapter.weights.items():
        stem = f"base_model.model.{adapter.prefix}.{layer}.{MODULES.get(part, part)}"
        tensors[f"{stem}.lora_A.weight"] = a.contiguous()
        tensors[f"{stem}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
