"""The decoder's layers by kernels, between its linear products: for generation, and with the values that a backward
pass reads.

Promise: whether values are kept or not, a token's hidden states are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from rookery.worker.engine.native.kernels.lora import KernelAdapter, LayerStages
from rookery.worker.model.decoder import Decoder


@dataclass(frozen=True)
class LayerValues:
    """The activations of one layer [tokens, …]: the residual stream ``x`` before it, and ``middle`` of it; the norms'
    outputs; the projections with their deltas; and of each site LoRA's middle ``inner``, see ``LayerStages``."""

    x: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    middle: Tensor
    mlp_normed: Tensor
    gate_up: Tensor
    activated: Tensor
    inner: dict[str, Tensor]


Attend = Callable[[int, Tensor], Tensor]
"""``attend(layer, qkv)`` takes the layer's projections, neither normalised nor rotated → [tokens, heads · head_dim]."""


def run_layer(
    stages: LayerStages, i: int, y: Tensor | None, attend: Attend, *, keep: bool
) -> tuple[Tensor, LayerValues | None]:
    """Layer ``i``: ``y`` is what it returned of the layer before, None without one; ``keep`` asks for its values."""
    w, residual, inner = stages.decoder.layers[i], stages.residual, {}
    normed = stages.norm(w.attention_norm, y, (i - 1, "down") if y is not None else None, (i, "qkv"))
    x, inner["qkv"] = residual.clone() if keep else residual, stages.inner
    qkv = stages.expand((i, "qkv"), w.qkv(normed))
    attended = stages.shrink((i, "o"), attend(i, qkv))
    inner["o"] = stages.inner
    mlp_normed = stages.norm(w.mlp_norm, w.o(attended), (i, "o"), (i, "gate_up"))
    middle, inner["gate_up"] = residual.clone() if keep else residual, stages.inner
    gate_up = w.gate_up(mlp_normed)
    if keep:
        gate_up = stages.expand((i, "gate_up"), gate_up)
    activated = stages.swiglu(gate_up, None if keep else (i, "gate_up"), (i, "down"))
    inner["down"] = stages.inner
    values = LayerValues(x, normed, qkv, attended, middle, mlp_normed, gate_up, activated, inner) if keep else None
    return w.down(activated), values


def forward(
    decoder: Decoder,
    tokens: Tensor,
    groups: Sequence[tuple[KernelAdapter | None, int]],
    attend: Attend,
) -> Tensor:
    """``Decoder.forward`` of tokens [tokens] by kernels, without gradients: hidden states after the final norm [tokens,
    hidden]. ``groups`` as in ``LayerStages``."""
    stages, y = LayerStages(decoder, F.embedding(tokens, decoder.embedding), groups), None
    for i in range(len(decoder.layers)):
        y, _ = run_layer(stages, i, y, attend, keep=False)
    return stages.norm(decoder.norm, y, (len(decoder.layers) - 1, "down"), None)
