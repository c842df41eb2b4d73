"""Models of published shapes with random weights, and what a GPU could do with them at best.

The shapes are those of the models' config files; nothing is downloaded. Weights are normal with deviation 0.02, as
the published models begin their training with; the final norm is scaled so that logits spread like a trained model's,
or every word would be a candidate in every draw."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rookery.worker.model.config import SITES, DecoderConfig

DEVIATION = 0.02
LOGITS_DEVIATION = 4.0
"""Of 152,000 words some hundreds are then within eight nats of the likeliest."""


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
}

PEAKS = {
    "H200": (989e12, 4.8e12),
    "H100 PCIe": (756e12, 2.0e12),
    "H100": (989e12, 3.35e12),
    "A100-SXM4-80GB": (312e12, 2.039e12),
    "A100 80GB PCIe": (312e12, 1.935e12),
    "A100": (312e12, 1.555e12),
}
"""Dense bfloat16 FLOP/s and bytes/s from the makers' data sheets, by a part of the device's name; the first that fits
counts. Others are probed."""


@dataclass(frozen=True)
class Roof:
    """The best figures of a device, and their source."""

    flops: float
    bytes: float
    source: str

    def seconds(self, flops: float, moved: float) -> float:
        """The least time for so many operations and bytes."""
        return max(flops / self.flops, moved / self.bytes)


def roof(name: str, probe: Callable[[], tuple[float, float]]) -> Roof:
    """By the table, or by what ``probe`` measures."""
    for part, (flops, moved) in PEAKS.items():
        if part in name:
            return Roof(flops, moved, f"data sheet of the {part}")
    return Roof(*probe(), "measured: a matrix product and a copy")


def probe(device: torch.device) -> tuple[float, float]:
    """Measured bfloat16 FLOP/s of a large product and bytes/s of a large copy, reads and writes counted."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * 8192**3 / _seconds(lambda: a @ b)
    source = torch.empty(1 << 30, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return flops, 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _seconds(work: Callable[[], object]) -> float:
    """Of one call, the mean of ten after three."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / 10


def random_weights(
    config: DecoderConfig, device: torch.device, dtype: torch.dtype, deviation: float = DEVIATION
) -> dict[str, Tensor]:
    """Of a model of this shape, under ``Decoder``'s names, made on the device."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, deviation, generator=generator)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    scale = norm_scale(config.hidden, deviation)
    weights = {"embed": normal(config.vocab, config.hidden), "norm": ones(config.hidden) * scale}
    if not config.tied:
        weights["head"] = normal(config.vocab, config.hidden)
    for i in range(config.layers):
        at = f"layers.{i}."
        weights |= {at + "attention_norm": ones(config.hidden), at + "mlp_norm": ones(config.hidden)}
        if config.qk_norm:
            weights |= {at + "q_norm": ones(config.head_dim), at + "k_norm": ones(config.head_dim)}
        for site, parts in SITES.items():
            shapes = [config.site_shape(part) for part in parts]
            weights[at + site] = normal(sum(out for _, out in shapes), shapes[0][0])
    return weights


def norm_scale(hidden: int, deviation: float = DEVIATION) -> float:
    """The final norm's weight with which logits have ``LOGITS_DEVIATION``."""
    return float(LOGITS_DEVIATION / (deviation * hidden**0.5))


def linear_numbers(config: DecoderConfig) -> int:
    """Weights of the linear layers and the output projection: what every token is multiplied with."""
    layer = sum(config.site_shape(part)[0] * config.site_shape(part)[1] for parts in SITES.values() for part in parts)
    return config.layers * layer + config.vocab * config.hidden


def lora_numbers(config: DecoderConfig, rank: int) -> int:
    """Weights of one adapter on every linear layer."""
    return config.layers * rank * sum(sum(config.site_shape(part)) for parts in SITES.values() for part in parts)


def decode_work(
    config: DecoderConfig, rows: int, context: float, held: float, rank: int, adapters: int
) -> tuple[float, float]:
    """Operations and bytes of a decode step of ``rows`` rows over ``context`` tokens each, in bfloat16: every weight
    and every cached key and value is read once. The cache has ``held`` tokens: fewer than rows times context where
    rows share a prompt."""
    linear, lora = linear_numbers(config), lora_numbers(config, rank) if adapters else 0
    attention = 4 * config.layers * config.heads * config.head_dim * context
    cached = 2 * config.layers * config.kv_heads * config.head_dim
    return rows * (2 * (linear + lora) + attention), 2 * (linear + adapters * lora + held * cached)


def training_work(config: DecoderConfig, tokens: int, length: int, rank: int) -> float:
    """Operations of forward and backward over ``tokens`` in sequences of ``length`` with loss on every token: base
    weights are frozen, so that they cost a product forward and one backward; an adapter's cost two backward; attention
    costs 2.5 times as much backward as forward; half of it is masked. What is computed twice counts once."""
    attention = 4 * config.layers * config.heads * config.head_dim * length / 2
    return tokens * (4 * linear_numbers(config) + 6 * lora_numbers(config, rank) + 3.5 * attention)
