"""Attention over a packed batch: chunked matmuls, or fused kernels where the device has them.

Promises:

* A token attends to the tokens that :mod:`~rookery.worker.trainer.packing` states.
* A shared prompt's keys and values are computed once; the gradients from its members are summed.
* :class:`ChunkedAttention` holds scores for one chunk at a time (at most ``ChunkSizes.scores`` of them), forward and
  backward, and keeps only q, k and v for the backward pass. Memory grows with the tokens, not with their square.

Rows of a block's score matrix are (token, query head of the group), columns the keys of that head's key/value head:
one batched product serves all heads of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rookery.worker.device import fuses
from rookery.worker.model.decoder import AttentionBackend, Decoder
from rookery.worker.model.varlen_attention import SequenceBounds, varlen_attention
from rookery.worker.trainer.packed_pass import SUMMED_ROWS
from rookery.worker.trainer.packing import AttentionBlock, PackedBatch


@dataclass(frozen=True)
class ChunkSizes:
    """How much attention is computed at once."""

    queries: int = 128
    """Tokens of a sequence whose queries go together: enough rows for the matmuls' full speed, few enough that little
    is computed above the diagonal."""
    scores: int = 1 << 19
    """Scores that exist at once: 1 MB in bfloat16, 2 MB in the float32 of a backward pass, so that the passes of a
    softmax find them in the cache."""


AttentionFactory = Callable[[Decoder, PackedBatch], AttentionBackend]
"""Creates the attention over a packed batch."""


def attention_for(decoder: Decoder) -> AttentionFactory:
    """Fused kernels where the decoder's device has them; without them, varlen attention would hold all scores of a
    sequence at once, so chunks are used."""
    if fuses(decoder.device, decoder.dtype):
        return VarlenAttention
    return partial(ChunkedAttention, chunks=ChunkSizes())


class _Plan:
    """A block prepared for a number of heads, the same for all layers: gather indices into ``[tokens · kv_heads, …]``
    views, and its chunks. Its batch is (pack, kv head, member), in that order."""

    def __init__(
        self, block: AttentionBlock, kv_heads: int, group: int, dtype: torch.dtype, chunks: ChunkSizes
    ) -> None:
        self.packs, self.members, self.tail = block.queries.shape
        self.kv_heads, self.group, self.prefix = kv_heads, group, block.prefix
        self.keys = self.prefix + self.tail
        self.batch = self.packs * kv_heads * self.members
        device = block.queries.device
        head = torch.arange(kv_heads, device=device).view(1, kv_heads, 1, 1)
        self.gather_q = (block.queries[:, None] * kv_heads + head).flatten()
        self.gather_k = (block.keys[:, None] * kv_heads + head).flatten()
        inside = torch.arange(self.tail, device=device) < block.lengths[:, :, None]
        self.inside = inside[:, None].expand(-1, kv_heads, -1, -1).flatten()
        self.padding = (~self.inside).nonzero()[:, 0]
        real = torch.arange(self.prefix, device=device) < block.prefixes[:, None]
        self.real_prefix = real[:, None].expand(-1, kv_heads, -1).flatten().nonzero()[:, 0]
        shared = (block.keys[:, :1, : self.prefix] * kv_heads)[:, None] + head
        self.prefix_rows = shared.flatten()[self.real_prefix]
        self._own = torch.cat([real, real.new_ones(self.packs, self.tail)], 1)
        before = torch.arange(self.prefix, device=device).expand(self.packs, -1)
        self._positions = torch.cat([before, block.prefixes[:, None] + torch.arange(self.tail, device=device)], 1)
        self._uniform = bool(real.all()) and bool((block.prefixes == block.prefixes[0]).all())
        self._dtype = dtype
        self._masks: dict[int, Tensor] = {}
        # The last chunk is first: it covers all keys, so it initialises the sums that the others add to.
        most = max(1, SUMMED_ROWS // group)  # the gradients of keys and values are sums over a chunk's rows
        count = max(1, round(self.tail / chunks.queries), -(-self.tail // most))
        edges = [self.tail * i // count for i in range(count + 1)]
        self.cuts = list(pairwise(edges))[::-1]
        largest = max(stop - start for start, stop in self.cuts) * group * self.keys
        parts = min(self.batch, -(-self.batch * largest // chunks.scores))
        self.parts = [slice(self.batch * i // parts, self.batch * (i + 1) // parts) for i in range(parts)]

    def queries(self, q: Tensor) -> Tensor:
        """[tokens, heads, head_dim] → [batch, tail · group, head_dim]"""
        rows = q.reshape(-1, self.group * q.shape[-1]).index_select(0, self.gather_q)
        return rows.view(self.batch, self.tail * self.group, q.shape[-1])

    def keyed(self, k: Tensor) -> Tensor:
        """[tokens, kv_heads, head_dim] → [batch, keys, head_dim]"""
        return k.reshape(-1, k.shape[-1]).index_select(0, self.gather_k).view(self.batch, self.keys, k.shape[-1])

    def add_prefix(self, out: Tensor, block: Tensor) -> None:
        """Adds the members' gradients of their shared prefix, summed: ``block`` [batch, keys, head_dim] to ``out``
        [tokens · kv_heads, head_dim]. A prefix is in a block at most once, so no row is added to twice."""
        if self.prefix:
            by_member = block.view(-1, self.members, self.keys, out.shape[1])[:, :, : self.prefix]
            shared = by_member.sum(1).view(-1, out.shape[1]).index_select(0, self.real_prefix).to(out.dtype)
            out.index_copy_(0, self.prefix_rows, out.index_select(0, self.prefix_rows).add_(shared))

    def probabilities(self, q: Tensor, k: Tensor, part: slice, start: int, window: int) -> Tensor:
        """The probabilities of q [part, query rows, head_dim] from token ``start`` on, over k [part, keys up to theirs,
        head_dim], in their dtype."""
        if len(self.cuts) == 1:
            if window not in self._masks:
                self._masks[window] = self._mask(0, self.tail, window)
            return torch.softmax(
                torch.baddbmm(self._of(part, self._masks[window].to(q.dtype)), q, k.transpose(1, 2)), -1
            )
        scores = torch.bmm(q, k.transpose(1, 2))
        tokens = q.shape[1] // self.group
        if self._uniform and not 0 < window < self.keys:  # only a chunk's own square needs a mask
            ahead = torch.full((tokens, tokens), float("-inf"), dtype=scores.dtype, device=scores.device).triu_(1)
            scores.view(-1, tokens, self.group, k.shape[1])[..., self.prefix + start :] += ahead[:, None, :]
        else:
            scores += self._of(part, self._mask(start, start + tokens, window).to(q.dtype))
        return torch.softmax(scores, -1)

    def _mask(self, start: int, stop: int, window: int) -> Tensor:
        """0 where a query token from ``start`` to ``stop`` attends, −inf elsewhere [packs or 1, query rows, keys up to
        theirs]."""
        packs = slice(0, 1) if self._uniform else slice(None)
        keys = self.prefix + stop
        of_keys = self._positions[packs, None, :keys]
        of_queries = self._positions[packs, self.prefix + start : keys, None]
        seen = self._own[packs, None, :keys] & (of_keys <= of_queries)
        if window:
            seen = seen & (of_queries - of_keys < window)
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        return mask.repeat_interleave(self.group, 1)

    def _of(self, part: slice, mask: Tensor) -> Tensor:
        """The mask of each batch row."""
        if len(mask) == 1:
            return mask.expand(part.stop - part.start, -1, -1)
        rows = torch.arange(part.start, part.stop, device=mask.device)
        return mask.index_select(0, rows // (self.kv_heads * self.members))


class _Plans:
    """All blocks of a batch. The blocks' results lie one after another in a buffer; one gather reorders its rows by
    token."""

    def __init__(
        self, blocks: Sequence[AttentionBlock], kv_heads: int, group: int, dtype: torch.dtype, chunks: ChunkSizes
    ) -> None:
        self.blocks = [_Plan(block, kv_heads, group, dtype, chunks) for block in blocks]
        inside = torch.cat([plan.inside for plan in self.blocks])
        rows = torch.cat([plan.gather_q for plan in self.blocks])[inside]
        self.size_q = len(inside)
        self.inverse_q = torch.empty_like(rows).index_copy_(0, rows, inside.nonzero()[:, 0])
        key_rows, at = [], 0
        for plan in self.blocks:
            own = torch.arange(at, at + plan.batch * plan.keys, device=rows.device)
            key_rows.append(own.view(plan.batch, plan.keys)[:, plan.prefix :].flatten())
            at += plan.batch * plan.keys
        self.inverse_k = torch.empty_like(rows).index_copy_(0, rows, torch.cat(key_rows)[inside])

    def buffers(self, like: Tensor, *, keys: bool = False) -> tuple[Tensor, list[Tensor]]:
        """A buffer for all blocks' results of the width of ``like``, and each block's view of it, [batch, rows,
        head_dim]."""
        sizes = [plan.batch * (plan.keys if keys else plan.tail * plan.group) for plan in self.blocks]
        whole = torch.empty(sum(sizes), like.shape[-1], dtype=like.dtype, device=like.device)
        parts = whole.split(sizes)
        return whole, [x.view(plan.batch, -1, x.shape[-1]) for x, plan in zip(parts, self.blocks, strict=True)]

    def queries(self, whole: Tensor, shape: torch.Size) -> Tensor:
        """The queries of a buffer, [tokens, heads, head_dim]."""
        return whole.view(self.size_q, -1).index_select(0, self.inverse_q).view(shape)

    def keys(self, whole: Tensor, parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
        """The keys of a buffer, [tokens, kv_heads, head_dim], with the prefixes' sums added."""
        out = whole.index_select(0, self.inverse_k)
        for plan, part in zip(self.blocks, parts, strict=True):
            plan.add_prefix(out, part)
        return out.view(shape)

    def gradients(self, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients by q, k and v, from the output's ``d_out`` [tokens, heads, head_dim]. Scores and probabilities
        are at least float32 here, as in the kernels' forward pass: scores of 40 that are rounded to bfloat16 make
        probabilities wrong by up to an eighth, and the gradients by some percent."""
        scale, wide = q.shape[-1] ** -0.5, torch.promote_types(q.dtype, torch.float32)
        whole_q, parts_q = self.buffers(q)
        whole_k, parts_k = self.buffers(k, keys=True)
        whole_v, parts_v = self.buffers(v, keys=True)
        for plan, d_queries, d_keys, d_values in zip(self.blocks, parts_q, parts_k, parts_v, strict=True):
            queries, keys, values, d_block = (
                plan.queries(q).mul_(scale),
                plan.keyed(k),
                plan.keyed(v),
                plan.queries(d_out),
            )
            # A padding row repeats a real one; its result is not read, so its gradient is 0.
            d_block.view(plan.batch * plan.tail, -1).index_fill_(0, plan.padding, 0)
            for part in plan.parts:
                sum_k, sum_v = _Sum(d_keys[part], len(plan.cuts)), _Sum(d_values[part], len(plan.cuts))
                for start, stop in plan.cuts:
                    rows, seen = slice(start * plan.group, stop * plan.group), plan.prefix + stop
                    part_q, part_k, d_part = queries[part, rows], keys[part, :seen], d_block[part, rows]
                    p = plan.probabilities(part_q.to(wide), part_k.to(wide), part, start, window)
                    sum_v.add(p.to(q.dtype).transpose(1, 2), d_part)
                    d_p = torch.bmm(d_part, values[part, :seen].transpose(1, 2)).to(wide)
                    # PyTorch's backward pass of a softmax adds a row up in an order that depends on the threads.
                    d_s = d_p.sub_(torch.linalg.vecdot(d_p, p).unsqueeze(-1)).mul_(p).to(q.dtype)
                    _product(d_queries[part, rows], d_s, part_k)
                    sum_k.add(d_s.transpose(1, 2), part_q)
                sum_k.finish()
                sum_v.finish()
        return (
            self.queries(whole_q.mul_(scale), q.shape),
            self.keys(whole_k, parts_k, k.shape),
            self.keys(whole_v, parts_v, v.shape),
        )


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plans: _Plans, window: int) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.plans, ctx.window = plans, window
        scale = q.shape[-1] ** -0.5
        whole, outs = plans.buffers(q)
        for plan, out in zip(plans.blocks, outs, strict=True):
            queries, keys, values = plan.queries(q).mul_(scale), plan.keyed(k), plan.keyed(v)
            for part in plan.parts:
                for start, stop in plan.cuts:
                    rows, seen = slice(start * plan.group, stop * plan.group), plan.prefix + stop
                    p = plan.probabilities(queries[part, rows], keys[part, :seen], part, start, window)
                    _product(out[part, rows], p, values[part, :seen])
        return plans.queries(whole, q.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        return *ctx.plans.gradients(*ctx.saved_tensors, gradients[0], ctx.window), None, None


class _Sum:
    """A sum of products over chunks of queries; the first product covers all keys, the others their first ones. Several
    are summed in float32, a single one is written to ``out`` directly."""

    def __init__(self, out: Tensor, products: int) -> None:
        self._out = out
        self._sum = out if products == 1 else torch.empty_like(out, dtype=torch.promote_types(out.dtype, torch.float32))
        self._begun = False

    def add(self, left: Tensor, right: Tensor) -> None:
        if self._begun:
            self._sum[:, : left.shape[1]] += torch.bmm(left, right)
        else:
            _product(self._sum, left, right)
        self._begun = True

    def finish(self) -> None:
        if self._sum is not self._out:
            self._out.copy_(self._sum)


def _product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """``out`` = left · right, without a copy where the layout allows it."""
    if out.is_contiguous() and out.dtype == left.dtype:
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left, right))


class ChunkedAttention:
    """The ``AttentionBackend`` of a packed batch by chunked matmuls, recomputed in the backward pass."""

    def __init__(self, decoder: Decoder, batch: PackedBatch, chunks: ChunkSizes) -> None:
        config = decoder.config
        self._windows = config.windows
        self._plans = _Plans(batch.blocks(), config.kv_heads, config.group, decoder.dtype, chunks)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Blocks cover every row, because every token attends at least to itself."""
        return _ChunkedAttention.apply(q, k, v, self._plans, self._windows[layer])

    def gradients(self, layer: int, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients by q, k and v, of an output whose gradient is ``d_out`` [tokens, heads, head_dim]."""
        return self._plans.gradients(q, k, v, d_out, self._windows[layer])


class _Repeat(torch.autograd.Function):
    """``x[rows]`` [len(rows), …] of x [tokens, …], where ``rows`` may repeat; gradients are summed in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.tokens = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        (g,) = gradients
        dtype = torch.promote_types(g.dtype, torch.float32)
        total = torch.zeros(ctx.tokens, *g.shape[1:], dtype=dtype, device=g.device)
        return total.index_add_(0, rows, g.to(dtype)).to(g.dtype), None


class VarlenAttention:
    """The ``AttentionBackend`` of a packed batch by fused kernels (``model.varlen_attention``): each prompt and each
    tail is a sequence of queries over the keys of the shared prompt, if any, and its own."""

    def __init__(self, decoder: Decoder, batch: PackedBatch) -> None:
        spans = batch.spans()
        self._windows = decoder.config.windows
        self._sequences = SequenceBounds.from_lengths(
            [span.length for span in spans], [span.prefix + span.length for span in spans], decoder.device
        )
        self._keys: Tensor | None = None
        if any(span.prefix for span in spans):
            ranges = [
                torch.arange(begin, begin + length)
                for span in spans
                for begin, length in ((span.shared, span.prefix), (span.start, span.length))
            ]
            self._keys = torch.cat(ranges).to(decoder.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._keys is not None:
            k, v = (_Repeat.apply(x, self._keys) for x in (k, v))
        return varlen_attention(q, k, v, self._sequences, self._windows[layer])
