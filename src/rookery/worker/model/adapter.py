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
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rookery.errors import UserError
from rookery.worker.model.config import DecoderConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PARTS = ("q", "k", "v", "o", "gate", "up", "down")
_MODULES = {part: ("self_attn" if part in "qkvo" else "mlp") + f".{part}_proj" for part in PARTS}
_KEY = re.compile(r"(?:base_model\.model\.)?model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj\.lora_([AB])\.weight")
_UNSUPPORTED = ("use_dora", "layer_replication", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias")
"""PEFT options under which B A x is not the whole delta."""


@dataclass(frozen=True)
class Adapter:
    """``weights[layer, part]`` = (A [rank, in], B [out, rank]), float32. Parts that are not targeted are absent."""

    rank: int
    alpha: float
    weights: dict[tuple[int, str], tuple[Tensor, Tensor]]
    rslora: bool = False

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def targets(self) -> list[str]:
        """Parts that any layer adapts, in the order of ``PARTS``."""
        present = {part for _, part in self.weights}
        return [part for part in PARTS if part in present]


def init_adapter(config: DecoderConfig, rank: int, alpha: float, targets: list[str], seed: int) -> Adapter:
    """Version 0: B = 0 and A uniform in ±1/√in (PEFT's default, Kaiming uniform with a = √5), drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.layers):
        for part in PARTS:
            if part in targets:
                inputs, outputs = config.site_shape(part)
                bound = 1.0 / math.sqrt(inputs)
                a = torch.rand(rank, inputs, generator=generator).mul_(2 * bound).sub_(bound)
                weights[layer, part] = (a, torch.zeros(outputs, rank))
    return Adapter(rank=rank, alpha=alpha, weights=weights)


def adapter_numbers(config: DecoderConfig, rank: int, targets: list[str]) -> int:
    """Number of weights of an adapter."""
    return config.layers * rank * sum(sum(config.site_shape(part)) for part in targets)


def read_adapter(folder: Path, config: DecoderConfig) -> Adapter:
    """The adapter in a PEFT folder. Raises ``UserError`` for what is no LoRA of this model."""
    try:
        about = json.loads((folder / CONFIG_FILE).read_text())
        tensors = load_file(folder / WEIGHTS_FILE)
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
    pairs: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or match[2] not in PARTS:
            raise UserError(f"{folder}: weight {key} is no LoRA of an attention or MLP projection")
        pairs.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor.float()
    if not pairs:
        raise UserError(f"{folder} is no PEFT adapter: {WEIGHTS_FILE} holds no weights")
    for (layer, part), pair in pairs.items():
        inputs, outputs = config.site_shape(part)
        fits = len(pair) == 2 and pair["A"].shape == (rank, inputs) and pair["B"].shape == (outputs, rank)
        if layer >= config.layers or not fits:
            raise UserError(f"{folder}: the LoRA of layer {layer} {part} does not fit this base model at rank {rank}")
    return Adapter(
        rank=rank,
        alpha=about["lora_alpha"],
        weights={site: (pair["A"], pair["B"]) for site, pair in pairs.items()},
        rslora=bool(about.get("use_rslora")),
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
        "target_modules": [f"{part}_proj" for part in adapter.targets],
        "bias": "none",
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(about, indent=2) + "\n")
    tensors = {}
    for (layer, part), (a, b) in adapter.weights.items():
        stem = f"base_model.model.model.layers.{layer}.{_MODULES[part]}"
        tensors[f"{stem}.lora_A.weight"] = a.contiguous()
        tensors[f"{stem}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
