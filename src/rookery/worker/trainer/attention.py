"""Attention over a packed stream by plain batched matmuls, recomputed in the backward pass.

Promises:

* Scores exist for one chunk at a time (at most ``Chunks.scores`` of them), forward and backward; what is kept for the
  backward pass is q, k and v alone. Memory grows with the tokens, not with their square.
* A shared prompt's keys and values are computed once; the gradients that its members send back are summed.

Rows of a block's score matrix are (token, query head of the group), columns the keys of that head's key/value head:
one batched product serves all heads of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rookery.worker.model.config import DecoderConfig
from rookery.worker.trainer.packing import Block


@dataclass(frozen=True)
class Chunks:
    """How much attention is computed at once."""

    queries: int = 128
    """Tokens of a sequence whose queries go together: enough rows for the matmuls' full speed, few enough that little
    is computed above the diagonal."""
    scores: int = 1 << 20
    """Scores alive at once: 2 MB in bfloat16, so that the passes of a softmax find them in the cache."""


@dataclass(frozen=True)
class _Piece:
    """Rows ``batch`` and query tokens ``start`` … ``stop - 1`` of a block, over its first ``keys`` keys."""

    batch: slice
    start: int
    stop: int
    keys: int


class _Plan:
    """A block made ready for a number of heads: gather indices into ``[tokens · kv_heads, …]`` views and masks, the
    same for all layers. ``window`` 0 is none."""

    def __init__(self, block: Block, kv_heads: int, group: int, chunks: Chunks) -> None:
        bundles, members, tail = block.queries.shape
        self.bundles, self.members, self.kv_heads, self.group = bundles, members, kv_heads, group
        self.prefix, self.tail, self.keys = block.prefix, tail, block.prefix + tail
        self.batch = bundles * kv_heads * members
        device = block.queries.device
        head = torch.arange(kv_heads, device=device).view(1, kv_heads, 1, 1)
        # [bundles, kv_heads, members, tokens]: the order of a block's batch
        self.gather_q = (block.queries[:, None] * kv_heads + head).flatten()
        self.gather_k = (block.keys[:, None] * kv_heads + head).flatten()
        inside = (torch.arange(tail, device=device) < block.lengths[:, :, None])[:, None].expand(-1, kv_heads, -1, -1)
        self.padded = not bool(inside.all())
        self.real = inside.flatten().nonzero()[:, 0]
        self.padding = (~inside.flatten()).nonzero()[:, 0]
        self.rows = self.gather_q[self.real]
        first = torch.arange(self.prefix, device=device) < block.prefixes[:, None]
        self.real_prefix = first[:, None].expand(-1, kv_heads, -1).flatten().nonzero()[:, 0]
        shared = (block.keys[:, :1, : self.prefix] * kv_heads)[:, None] + head
        self.prefix_rows = shared.flatten()[self.real_prefix]
        self.hidden_prefix = None if bool(first.all()) else ~first
        # positions, for sliding windows
        ahead = block.prefixes[:, None] + torch.arange(tail, device=device)
        self.positions_q = ahead
        self.positions_k = torch.cat([torch.arange(self.prefix, device=device).expand(bundles, -1), ahead], 1)
        self.pieces = list(self._pieces(chunks))

    def _pieces(self, chunks: Chunks) -> Iterator[_Piece]:
        # A remainder below half a chunk joins the one before it.
        count = max(1, round(self.tail / chunks.queries))
        edges = [self.tail * i // count for i in range(count + 1)]
        for start, stop in pairwise(edges):
            keys = self.prefix + stop
            rows = max(1, chunks.scores // ((stop - start) * self.group * keys))
            for first in range(0, self.batch, rows):
                yield _Piece(slice(first, min(first + rows, self.batch)), start, stop, keys)

    def queries(self, q: Tensor) -> Tensor:
        """[tokens, heads, head_dim] → [batch, tail · group, head_dim]"""
        width = q.shape[-1]
        rows = q.reshape(-1, self.group * width).index_select(0, self.gather_q)
        return rows.view(self.batch, self.tail * self.group, width)

    def keyed(self, k: Tensor) -> Tensor:
        """[tokens, kv_heads, head_dim] → [batch, keys, head_dim]"""
        width = k.shape[-1]
        return k.reshape(-1, width).index_select(0, self.gather_k).view(self.batch, self.keys, width)

    def put_queries(self, out: Tensor, block: Tensor) -> None:
        """The inverse of ``queries``, padding left out; ``out`` [tokens · kv_heads, group · head_dim]."""
        rows = block.view(self.batch * self.tail, out.shape[1])
        out.index_copy_(0, self.rows, rows.index_select(0, self.real) if self.padded else rows)

    def put_keys(self, out: Tensor, block: Tensor) -> None:
        """The transpose of ``keyed``: own rows are set (each token's tail stands in one block), a prefix's rows are
        summed over the members and added. ``out`` [tokens · kv_heads, head_dim]."""
        width = out.shape[1]
        own = block[:, self.prefix :].reshape(-1, width)
        out.index_copy_(0, self.rows, own.index_select(0, self.real) if self.padded else own)
        if self.prefix:
            by_member = block.view(-1, self.members, self.keys, width)[:, :, : self.prefix]
            shared = by_member.sum(1).view(-1, width).index_select(0, self.real_prefix)
            out.index_copy_(0, self.prefix_rows, out.index_select(0, self.prefix_rows).add_(shared))

    def mask(self, piece: _Piece, scores: Tensor, window: int) -> Tensor:
        """``scores`` [batch part, query rows, keys] with what a row must not see at −inf, in place."""
        tokens = piece.stop - piece.start
        causal = torch.full((tokens, tokens), float("-inf"), dtype=scores.dtype, device=scores.device).triu_(1)
        own = scores.view(-1, tokens, self.group, piece.keys)[..., self.prefix + piece.start :]
        own += causal[:, None, :]
        if self.hidden_prefix is not None:
            hidden = self.hidden_prefix[self._bundles(piece)][:, None]
            scores[..., : self.prefix].masked_fill_(hidden, float("-inf"))
        if 0 < window < self.keys:
            of = self._bundles(piece)
            ahead = self.positions_q[of, piece.start : piece.stop, None] - self.positions_k[of, None, : piece.keys]
            by_head = scores.view(-1, tokens, self.group, piece.keys)
            by_head.masked_fill_((ahead >= window)[:, :, None], float("-inf"))
        return scores

    def _bundles(self, piece: _Piece) -> Tensor:
        """The bundle of each batch row in ``piece``."""
        rows = torch.arange(piece.batch.start, piece.batch.stop, device=self.gather_q.device)
        return rows // (self.kv_heads * self.members)


def _probabilities(plan: _Plan, piece: _Piece, q: Tensor, k: Tensor, window: int) -> Tensor:
    return torch.softmax(plan.mask(piece, torch.bmm(q, k.transpose(1, 2)), window), -1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plans: Sequence[_Plan], window: int) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.plans, ctx.window = plans, window
        scale = q.shape[-1] ** -0.5
        out = torch.empty(len(q) * k.shape[1], q[0].numel() // k.shape[1], dtype=q.dtype, device=q.device)
        for plan in plans:
            queries, keys, values = plan.queries(q).mul_(scale), plan.keyed(k), plan.keyed(v)
            block = torch.empty_like(queries)
            for piece in plan.pieces:
                rows = slice(piece.start * plan.group, piece.stop * plan.group)
                p = _probabilities(plan, piece, queries[piece.batch, rows], keys[piece.batch, : piece.keys], window)
                block[piece.batch, rows] = torch.bmm(p, values[piece.batch, : piece.keys])
            plan.put_queries(out, block)
        return out.view(q.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v = ctx.saved_tensors
        (d_out,) = gradients
        scale = q.shape[-1] ** -0.5
        dq = torch.empty(len(q) * k.shape[1], q[0].numel() // k.shape[1], dtype=q.dtype, device=q.device)
        dk, dv = (torch.empty(len(k) * k.shape[1], k.shape[2], dtype=k.dtype, device=k.device) for _ in range(2))
        for plan in ctx.plans:
            queries, keys, values = plan.queries(q).mul_(scale), plan.keyed(k), plan.keyed(v)
            d_block = plan.queries(d_out)
            if plan.padded:
                d_block.view(plan.batch * plan.tail, -1).index_fill_(0, plan.padding, 0)
            d_queries = torch.empty_like(queries)
            # Keys are met by several chunks of queries: sums of many go in float32.
            wide = torch.promote_types(k.dtype, torch.float32)
            d_keys, d_values = (torch.zeros(keys.shape, dtype=wide, device=q.device) for _ in range(2))
            for piece in plan.pieces:
                rows = slice(piece.start * plan.group, piece.stop * plan.group)
                part_q, part_k = queries[piece.batch, rows], keys[piece.batch, : piece.keys]
                d_part = d_block[piece.batch, rows]
                p = _probabilities(plan, piece, part_q, part_k, ctx.window)
                d_p = torch.bmm(d_part, values[piece.batch, : piece.keys].transpose(1, 2))
                d_values[piece.batch, : piece.keys] += torch.bmm(p.transpose(1, 2), d_part)
                d_s = torch.ops.aten._softmax_backward_data(d_p, p, -1, p.dtype)
                d_queries[piece.batch, rows] = torch.bmm(d_s, part_k)
                d_keys[piece.batch, : piece.keys] += torch.bmm(d_s.transpose(1, 2), part_q)
            plan.put_queries(dq, d_queries.mul_(scale))
            plan.put_keys(dk, d_keys.to(k.dtype))
            plan.put_keys(dv, d_values.to(v.dtype))
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape), None, None


class PackedAttention:
    """The ``Attend`` of a packed stream."""

    def __init__(self, config: DecoderConfig, blocks: Sequence[Block], chunks: Chunks) -> None:
        self._windows = config.windows
        self._plans = [_Plan(block, config.kv_heads, config.group, chunks) for block in blocks]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Attend``. Rows that no block covers do not exist: every token attends at least to itself."""
        return _Attention.apply(q, k, v, self._plans, self._windows[layer])
