"""One decoder for every supported family, for the engine and for the trainer.

Promises:

* The decoder works on a flat stream of tokens and owns no cache. How tokens attend to each other, and which adapter
  belongs to which token, is brought in by two callables, so that generation and training run the same arithmetic.
* Base weights are frozen; gradients flow through what ``attend`` and ``lora`` bring in.
* On a CPU every token's result depends on that token's own inputs only, bit for bit, whatever else is in the stream, as
  long as the stream has at least two tokens (see ``batch_invariance``).
* No RoPE table depends on how many tokens asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from rookery.tokenization.registry import WEIGHTS
from rookery.worker.model.adapter import Projections
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.layers import PackedLinear, rms_norm, rotate, swiglu


def output_slices(model: Projections, site: str, layer: int = 0) -> dict[str, slice]:
    """Which rows of a fused projection's output are which part's, in order."""
    parts = model.sites[site]
    edges = accumulate((model.shapes[layer, part][1] for part in parts), initial=0)
    return {part: slice(*both) for part, both in zip(parts, pairwise(edges), strict=True)}


_FIRST_TABLE = 1024
"""Positions in the first RoPE table; it doubles when a sequence grows past it, so that a long context costs memory
only where it is used."""


class AttentionBackend(Protocol):
    """Attention of one layer over the whole stream."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], rotated and normalised but not scaled
        → [tokens, heads, head_dim]."""
        ...


class LoraProduct(Protocol):
    """Adds each token's own adapter to a projection of the base."""

    def __call__(self, layer: int, site: str, x: Tensor, y: Tensor) -> Tensor:
        """x [tokens, in], y = base(x) [tokens, out] → y + delta; ``site`` is a key of ``SITES``."""
        ...


@dataclass(frozen=True)
class Layer:
    """Frozen weights of one layer, projections as [out, in]."""

    attention_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


def _layer(cfg: DecoderConfig, weights: Mapping[str, Tensor], at: str, pack: bool) -> Layer:
    def projection(site: str, biased: bool) -> PackedLinear:
        return PackedLinear(weights[at + site], weights[at + site + "_bias"] if biased else None, pack=pack)

    return Layer(
        attention_norm=weights[at + "attention_norm"],
        qkv=projection("qkv", cfg.qkv_bias),
        q_norm=weights[at + "q_norm"] if cfg.qk_norm else None,
        k_norm=weights[at + "k_norm"] if cfg.qk_norm else None,
        o=projection("o", cfg.o_bias),
        mlp_norm=weights[at + "mlp_norm"],
        gate_up=projection("gate_up", cfg.mlp_bias),
        down=projection("down", cfg.mlp_bias),
    )


def best_dtype(device: torch.device | str = "cpu") -> torch.dtype:
    """bfloat16 where the device multiplies it natively, else float32 (emulated bfloat16 is slower than float32)."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


class Decoder:
    """The base model."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor], *, pack: bool = False) -> None:
        """``weights`` under the fused names that ``convert.fuse`` gives, all of one dtype and on one device; ``pack``
        as in ``PackedLinear``."""
        self.config = config
        self.projections, self.context, self.vocab = config, config.context, config.vocab
        self.pack = pack
        self.bytes = (1 + pack) * sum(weight.nbytes for weight in weights.values())
        """Bytes of the weights, packed copies included."""
        self.embedding = weights["embed"]
        self.norm = weights["norm"]
        self.head = self.embedding if config.tied else weights["head"]
        self._project = PackedLinear(self.head, pack=pack)
        self.dtype = self.embedding.dtype
        self.device = self.embedding.device
        self.layers = [_layer(config, weights, f"layers.{i}.", pack) for i in range(config.layers)]
        self._frequencies = torch.tensor(config.inverse_frequencies, dtype=torch.float32)
        # A GPU's recorded steps know the table by its address, and asking for the last position would wait for it.
        first = config.context if self.device.type == "cuda" else min(_FIRST_TABLE, config.context)
        self._tables = self._rotations(first)
        """Cosines and sines of the first positions. One assignment replaces both: two threads may compute."""

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        *,
        pack: bool = False,
    ) -> Decoder:
        """The decoder of a prepared model folder. On CPU, in the file's own dtype, the weights stay mapped and are
        shared between processes; packed copies of them are not."""
        config = DecoderConfig.read(folder)
        dtype = dtype or best_dtype(device)
        with safe_open(folder / WEIGHTS, framework="pt", device=str(device)) as file:
            weights = {name: file.get_tensor(name).to(dtype) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return cls(config, weights, pack=pack)

    def forward(self, tokens: Tensor, positions: Tensor, attend: AttentionBackend, lora: LoraProduct | None) -> Tensor:
        """tokens, positions [tokens] int64 → hidden states after the final norm [tokens, hidden], base dtype."""
        rotation = self.rotation(positions)
        x = F.embedding(tokens, self.embedding)
        for i in range(self.config.layers):
            x = self.layer(i, x, rotation, attend, lora)
        return self.final_norm(x)

    def layer(
        self, i: int, x: Tensor, rotation: tuple[Tensor, Tensor], attend: AttentionBackend, lora: LoraProduct | None
    ) -> Tensor:
        """One block: x [tokens, hidden] → [tokens, hidden]; ``rotation`` of the tokens' positions."""
        cfg, w = self.config, self.layers[i]
        x = x + self.attention(i, rms_norm(x, w.attention_norm, cfg.eps), rotation, attend, lora)
        return x + self.mlp(i, rms_norm(x, w.mlp_norm, cfg.eps), lora)

    def attention(
        self, i: int, h: Tensor, rotation: tuple[Tensor, Tensor], attend: AttentionBackend, lora: LoraProduct | None
    ) -> Tensor:
        """Block ``i``'s attention for the residual stream; ``h`` [tokens, hidden] is its normalised input."""
        cfg, w = self.config, self.layers[i]
        y = w.qkv(h)
        if lora is not None:
            y = lora(i, "qkv", h, y)
        q, k, v = self.heads(i, y, rotation)
        h = attend(i, q, k, v).reshape(len(h), cfg.heads * cfg.head_dim)
        y = w.o(h)
        return lora(i, "o", h, y) if lora is not None else y

    def mlp(self, i: int, h: Tensor, lora: LoraProduct | None) -> Tensor:
        """Block ``i``'s MLP for the residual stream; ``h`` [tokens, hidden] is its normalised input."""
        w = self.layers[i]
        y = w.gate_up(h)
        if lora is not None:
            y = lora(i, "gate_up", h, y)
        h = swiglu(y)
        y = w.down(h)
        return lora(i, "down", h, y) if lora is not None else y

    def final_norm(self, x: Tensor) -> Tensor:
        """The final norm: x [tokens, hidden] after the last layer → what ``project`` reads."""
        return rms_norm(x, self.norm, self.config.eps)

    def compute_logits(self, hidden: Tensor, *, whole: bool = False) -> Tensor:
        """hidden [n, hidden] → logits [n, vocab] in the base dtype; ``whole`` as in ``PackedLinear``."""
        return self._project.single_product(hidden) if whole else self._project(hidden)

    def heads(self, layer: int, y: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """y [tokens, (heads + 2 kv_heads) · head_dim] → q, k, v by head, normalised and rotated."""
        cfg, w = self.config, self.layers[layer]
        heads = y.view(len(y), cfg.heads + 2 * cfg.kv_heads, cfg.head_dim)
        qk, v = heads.split((cfg.heads + cfg.kv_heads, cfg.kv_heads), 1)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = qk.split((cfg.heads, cfg.kv_heads), 1)
            q = rms_norm(q, w.q_norm, cfg.eps)
            k = rms_norm(k, w.k_norm, cfg.eps)
            qk = torch.cat((q, k), 1)
        if cfg.rope[layer]:
            qk = rotate(qk, *rotation)
        q, k = qk.split((cfg.heads, cfg.kv_heads), 1)
        return q, k, v

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [tokens, 1, head_dim]; the sine's first half is negated, so that rotating is
        x·cos + roll(x)·sin (RoFormer, arXiv:2104.09864, in the half-split layout of the published checkpoints)."""
        cos, sin = self._tables
        if len(cos) < self.config.context:
            needed = int(positions.max()) + 1
            size = len(cos)
            while size < needed:
                size *= 2
            if size > len(cos):
                cos, sin = self._tables = self._rotations(size)
        return cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    def _rotations(self, size: int) -> tuple[Tensor, Tensor]:
        # The angle is rounded to float32 as in the published code; its functions are taken in float64, where a
        # vectorised and a scalar implementation cannot differ by enough to show after rounding.
        angle = torch.outer(torch.arange(size, dtype=torch.float32), self._frequencies).double()
        cos, sin = angle.cos() * self.config.rope_scale, angle.sin() * self.config.rope_scale
        both = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return both[0].to(self.device, self.dtype), both[1].to(self.device, self.dtype)
