"""The decoder's configuration, read from a model's Hugging Face ``config.json``.

Promise: everything that changes the result is read from the file or has the family's published default; what this
decoder cannot compute (an activation, a RoPE scaling, a family it does not know) is refused with a reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rookery.errors import UserError
from rookery.tokenization.registry import NATIVE_MODEL_TYPES, config_path

SITES = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
"""The fused projections and the parts each is made of, in order of their output rows."""

_ROPE_BASE = {"smollm3": 2_000_000.0}
"""``rope_theta`` where the file leaves it out; 10,000 (RoFormer, arXiv:2104.09864) for the other families."""

_TIED_BY_DEFAULT = ("smollm3",)


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and switches of one model. ``windows[i]`` is layer i's sliding window in tokens, the own one included
    (0: none); ``rope[i]`` tells whether layer i rotates at all."""

    model_type: str
    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: tuple[bool, ...]
    windows: tuple[int, ...]
    inverse_frequencies: tuple[float, ...]
    rope_scale: float
    """Factor on cosine and sine (YaRN's attention temperature; 1 elsewhere)."""

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    def site_shape(self, part: str) -> tuple[int, int]:
        """(in, out) features of one projection: ``q k v o gate up down``."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q": (self.hidden, query),
            "k": (self.hidden, key),
            "v": (self.hidden, key),
            "o": (query, self.hidden),
            "gate": (self.hidden, self.inner),
            "up": (self.hidden, self.inner),
            "down": (self.inner, self.hidden),
        }[part]

    @property
    def sites(self) -> Mapping[str, tuple[str, ...]]:
        return SITES

    @cached_property
    def shapes(self) -> Mapping[tuple[int, str], tuple[int, int]]:
        parts = [part for parts in SITES.values() for part in parts]
        return {(layer, part): self.site_shape(part) for layer in range(self.layers) for part in parts}

    @property
    def prefix(self) -> str:
        return "model.layers"

    @classmethod
    def read(cls, folder: Path) -> DecoderConfig:
        """The configuration of the model in ``folder``. Raises ``UserError``."""
        return cls.from_hf(json.loads(config_path(folder).read_text(encoding="utf-8")))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """The configuration in the dictionary in ``config.json`` (either generation of RoPE fields). Raises
        ``UserError``."""
        family = raw.get("model_type", "")
        if family not in NATIVE_MODEL_TYPES:
            raise UserError(f"model_type {family!r} is not supported; supported: {', '.join(NATIVE_MODEL_TYPES)}")
        if raw.get("hidden_act", "silu") != "silu":
            raise UserError(f"hidden_act {raw['hidden_act']!r} is not supported; supported: silu")
        layers, heads, hidden = raw["num_hidden_layers"], raw["num_attention_heads"], raw["hidden_size"]
        head_dim = raw.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
        context = raw["max_position_embeddings"]
        rope = _rope_layers(family, raw, layers)
        frequencies, scale = _frequencies(family, raw, head_dim, context)
        attention_bias = bool(raw.get("attention_bias", False))
        return cls(
            model_type=family,
            vocab=raw["vocab_size"],
            hidden=hidden,
            inner=raw["intermediate_size"],
            layers=layers,
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            context=context,
            eps=raw.get("rms_norm_eps", 1e-6),
            tied=bool(raw.get("tie_word_embeddings", family in _TIED_BY_DEFAULT)),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family != "qwen2" and attention_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            rope=rope,
            windows=_windows(family, raw, layers, rope),
            inverse_frequencies=tuple(frequencies.tolist()),
            rope_scale=scale,
        )


def _rope_layers(family: str, raw: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if family != "smollm3":
        return (True,) * layers
    given = raw.get("no_rope_layers")  # despite its name: 1 where the layer rotates
    if given is None:
        interval = raw.get("no_rope_layer_interval", 4)
        given = [(i + 1) % interval != 0 for i in range(layers)]
    return tuple(bool(x) for x in given[:layers])


def _windows(family: str, raw: Mapping[str, Any], layers: int, rope: tuple[bool, ...]) -> tuple[int, ...]:
    window = raw.get("sliding_window") or 0
    if family == "mistral":
        return (window,) * layers
    if family == "llama" or not raw.get("use_sliding_window", False) or not window:
        return (0,) * layers
    kinds = raw.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    if family == "smollm3":
        return tuple(0 if rotates else window for rotates in rope)
    first = raw.get("max_window_layers", 28)
    return tuple(window if i >= first else 0 for i in range(layers))


def _frequencies(family: str, raw: Mapping[str, Any], head_dim: int, context: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] float32 and the factor on cosine and sine."""
    given = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = given.get("rope_type") or given.get("type") or "default"
    base = float(given.get("rope_theta") or raw.get("rope_theta") or _ROPE_BASE.get(family, 10_000.0))
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("partial_rotary_factor other than 1 is not supported")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (base**exponents)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":  # position interpolation, arXiv:2306.15595
        return plain / given["factor"], 1.0
    original = given.get("original_max_position_embeddings") or context
    if kind == "llama3":
        return _llama3(plain, given, original), 1.0
    if kind == "yarn":
        return _yarn(plain, given, original, head_dim, base)
    raise UserError(f"RoPE type {kind!r} is not supported; supported: default, linear, llama3, yarn")


def _llama3(plain: Tensor, given: Mapping[str, Any], original: int) -> Tensor:
    """Llama 3.1's rule: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    factor, low, high = given["factor"], given["low_freq_factor"], given["high_freq_factor"]
    turns = original * plain / (2 * math.pi)  # rotations over the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * keep + plain / factor * (1.0 - keep)


def _yarn(plain: Tensor, given: Mapping[str, Any], original: int, head_dim: int, base: float) -> tuple[Tensor, float]:
    """YaRN, arXiv:2309.00071, section 3.2 (NTK by parts) and 3.4 (attention temperature)."""
    factor = given["factor"]

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(given.get("beta_fast") or 32), dimension(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 0.001)  # the published code's guard against an empty ramp
    stretched = ((torch.arange(head_dim // 2).float() - low) / width).clamp(0.0, 1.0)
    scale = given.get("attention_factor")
    if scale is None:

        def temperature(weight: float) -> float:
            return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

        one, all_dims = given.get("mscale"), given.get("mscale_all_dim")
        scale = temperature(one) / temperature(all_dims) if one and all_dims else temperature(1.0)
    return plain / factor * stretched + plain * (1.0 - stretched), float(scale)
