"""A pass over a packed batch by the engine's compiled kernels.

Promise: a token's hidden state, and so its log-probability, is bit for bit the one that sampling computed for the same
text and version; only a batch of a single token may differ. Backward passes read the values that the forward pass kept,
or compute them again one layer at a time; attention and the normalisation of its heads go through PyTorch's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rookery.worker.engine.kv_cache import KVCache
from rookery.worker.engine.native.kernels import gradients
from rookery.worker.engine.native.kernels.attention import KernelAttention
from rookery.worker.engine.native.kernels.gradients import add_norm_gradient, heads_gradient, swiglu_gradient
from rookery.worker.engine.native.kernels.layer_pass import LayerValues, forward, run_layer
from rookery.worker.engine.native.kernels.lora import KernelAdapter, LayerStages
from rookery.worker.engine.native.kernels.vec import LANES
from rookery.worker.engine.sequences import SequenceChunk, TokenStream
from rookery.worker.model.adapter_slots import padded_rank
from rookery.worker.model.batch_invariance import key_capacity
from rookery.worker.model.config import SITES
from rookery.worker.model.decoder import Decoder, output_slices
from rookery.worker.model.layers import PackedLinear
from rookery.worker.trainer.loss_head import Normalise
from rookery.worker.trainer.native.attention import ChunkedAttention, ChunkSizes
from rookery.worker.trainer.optim import LoraSite, PolicyState
from rookery.worker.trainer.packed_pass import PolicyRows, add_gradients
from rookery.worker.trainer.packing import PackedBatch

Groups = list[tuple[KernelAdapter | None, int]]


@torch.no_grad()
def infer(decoder: Decoder, batch: PackedBatch, policies: Sequence[PolicyRows]) -> Tensor:
    """``Backbone.infer`` of a decoder that kernels compute (``kernels.usable``)."""
    groups = _groups(decoder, policies, len(batch.tokens))
    return forward(decoder, batch.tokens, groups, _attention(decoder, batch))


class KernelPass:
    """``Backbone.forward`` of such a decoder; see ``BackwardPass``."""

    @torch.no_grad()
    def __init__(
        self,
        decoder: Decoder,
        batch: PackedBatch,
        policies: Sequence[PolicyRows],
        between_layers: Callable[[], None],
        *,
        recompute: bool,
    ) -> None:
        self._decoder, self._batch, self._policies, self._between_layers = decoder, batch, policies, between_layers
        self._groups = _groups(decoder, policies, len(batch.tokens))
        self._attend = _attention(decoder, batch)
        self._rotation = decoder.rotation(batch.positions)
        self._plain_attention = ChunkedAttention(decoder, batch, ChunkSizes())
        self._values: list[LayerValues | Tensor] = []
        """The values of each layer or, to compute them again, its input."""
        stages, y = LayerStages(decoder, F.embedding(batch.tokens, decoder.embedding), self._groups), None
        for i in range(len(decoder.layers)):
            y, values = run_layer(stages, i, y, self._attend, keep=True)
            assert values is not None
            self._values.append(values.x if recompute else values)
            between_layers()
        self.hidden = stages.norm(decoder.norm, y, (len(decoder.layers) - 1, "down"), None)
        self._last = stages.residual

    @torch.no_grad()
    def backward(self, d_hidden: Tensor) -> None:
        decoder = self._decoder
        stream = torch.zeros(self._last.shape)
        gradient = add_norm_gradient(stream, d_hidden, self._last, decoder.norm, decoder.config.eps)
        for i in reversed(range(len(decoder.layers))):
            values = self._values.pop()
            if isinstance(values, Tensor):
                _, again = run_layer(LayerStages(decoder, values, self._groups), i, None, self._attend, keep=True)
                assert again is not None
                values = again
            gradient = self._layer_gradient(i, values, stream, gradient)
            self._between_layers()

    def _layer_gradient(self, i: int, values: LayerValues, stream: Tensor, gradient: Tensor) -> Tensor:
        """Adds a layer's part to ``stream``, the gradient by the residual stream in float32 → the sum in the base's
        dtype, as ``gradient`` is it before; of the first layer's input none is needed."""
        w, eps = self._decoder.layers[i], self._decoder.config.eps
        d = self._site_gradient(i, "down", w.down, values.activated, values, gradient)
        d = self._site_gradient(i, "gate_up", w.gate_up, values.mlp_normed, values, swiglu_gradient(d, values.gate_up))
        gradient = add_norm_gradient(stream, d, values.middle, w.mlp_norm, eps)
        d = self._site_gradient(i, "o", w.o, values.attended, values, gradient)
        d = self._site_gradient(i, "qkv", w.qkv, values.normed, values, self._attention_gradient(i, values, d))
        return add_norm_gradient(stream, d, values.x, w.attention_norm, eps) if i else gradient

    def _site_gradient(
        self, i: int, site: str, linear: PackedLinear, x: Tensor, values: LayerValues, d_y: Tensor
    ) -> Tensor:
        """The gradient by x of a projection with its LoRA; adds those of the policies' weights."""
        d_x = d_y @ linear.weight
        for rows in self._policies:
            if (i, site) in rows.policy.sites:
                at, found = slice(rows.start, rows.stop), rows.policy.sites[i, site]
                h = _middle(values.inner[site][at], found, rows.policy.rank).to(x.dtype)
                add_gradients(found, rows.policy.scale, x[at], h, d_y[at], d_x[at])
        return d_x

    def _attention_gradient(self, i: int, values: LayerValues, d_out: Tensor) -> Tensor:
        """The gradient by the projections before attention, from that by its output."""
        plain = self._decoder.layers[i].q_norm is None
        with torch.set_grad_enabled(not plain):
            qkv = values.qkv.requires_grad_(not plain)
            q, k, v = self._decoder.heads(i, qkv, self._rotation)
        d_heads = self._plain_attention.gradients(i, q.detach(), k.detach(), v.detach(), d_out.view(q.shape))
        if plain:
            return heads_gradient(*d_heads, self._rotation if self._decoder.config.rope[i] else None)
        return torch.autograd.grad((q, k, v), qkv, d_heads)[0]


def normalise(decoder: Decoder) -> Normalise | None:
    """The kernel for this decoder's vocabulary; None for one that is no multiple of a vector's numbers."""
    return gradients.normalise if decoder.vocab % LANES == 0 else None


def _middle(inner: Tensor, site: LoraSite, rank: int) -> Tensor:
    """The columns [rows, parts · rank] of the parts that the policy adapts, from those of all parts in the kernels'
    ranks."""
    width = padded_rank(rank)
    if width == rank and [part.number for part in site.parts] == list(range(len(site.parts))):
        return inner[:, : len(site.parts) * rank]  # they lie side by side already
    return torch.cat([inner[:, part.number * width : part.number * width + rank] for part in site.parts], 1)


def _groups(decoder: Decoder, policies: Sequence[PolicyRows], tokens: int) -> Groups:
    """``LayerStages``' groups of rows that the policies cover, or of the base model's without any."""
    if not policies:
        return [(None, tokens)]
    for rows in policies:
        if rows.policy.packed is None:
            rows.policy.packed = _packed(decoder, rows.policy)
    return [(rows.policy.packed, rows.stop - rows.start) for rows in policies]


def _packed(decoder: Decoder, policy: PolicyState) -> KernelAdapter:
    config, rank, a, b = decoder.config, padded_rank(policy.rank), {}, {}
    for (layer, site), found in policy.sites.items():
        parts = SITES[site]
        outputs = output_slices(config, site)[parts[-1]].stop
        down = torch.zeros(len(parts), rank, config.site_shape(parts[0])[0], dtype=decoder.dtype)
        b[layer, site] = torch.zeros(outputs, rank, dtype=decoder.dtype)
        for part in found.parts:
            down[part.number, : policy.rank] = found.a[part.ranks]
            b[layer, site][part.outputs, : policy.rank] = part.b
        a[layer, site] = down.flatten(0, 1)
    return KernelAdapter.pack(rank, a, b, config.layers)


def _attention(decoder: Decoder, batch: PackedBatch) -> KernelAttention:
    """Over a cache of one layer, which every layer overwrites."""
    spans = batch.spans()
    config = replace(decoder.config, layers=1)
    token_bytes = 2 * config.kv_heads * config.head_dim * decoder.dtype.itemsize
    tokens = key_capacity(1) + sum(key_capacity(span.length) for span in spans)
    cache = KVCache(config, decoder.dtype, "cpu", tokens * token_bytes)
    slots, chunks = {}, []
    for span in spans:
        slot = cache.allocate(span.length)
        assert slot is not None
        slots[span.start] = slot
    for span in spans:
        shared = slots[span.shared] if span.prefix else None
        ids = batch.tokens[span.start : span.start + span.length].tolist()
        chunks.append(SequenceChunk("", ids, 0, slots[span.start], shared, span.prefix))
    return KernelAttention(decoder, cache, TokenStream(chunks, double=False))
